"""The documents: links lead somewhere, Python blocks compile, every error and verb has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import recoup.errors
from recoup.cli.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Made by `make demo`, and committed when it changes.
MADE_LATER = {ROOT / "docs" / "frontier.png"}

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and MyST make them."""
    headings = _HEADING.findall(_FENCE.sub("", _text(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", _text(page))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() and target not in MADE_LATER:
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in _anchors(target):
            broken.append(f"{link}: no such heading")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert _broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](gone.md) [b](#one) [c](#two) [d](https://example.org/x)\n\n```\n[e](in-code.md)\n```\n")
    assert _broken(page) == ["gone.md: no such file", "#two: no such heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page: Path) -> None:
    for number, block in enumerate(_PYTHON.findall(_text(page))):
        compile(block, f"{page.name} block {number}", "exec")


def test_the_readme_shows_python() -> None:
    assert len(_PYTHON.findall(_text(ROOT / "README.md"))) >= 3


def test_every_error_has_its_section() -> None:
    headings = set(_HEADING.findall(_text(ROOT / "docs" / "errors.md")))
    assert set(recoup.errors.__all__) <= headings


def test_every_error_is_listed_with_its_exit_status() -> None:
    listed = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (\d) \|", _text(ROOT / "docs" / "errors.md"), re.MULTILINE))
    statuses = {name: str(getattr(recoup.errors, name).exit_status) for name in recoup.errors.__all__ if name != "RecoupError"}
    assert listed == statuses


def test_every_verb_and_option_is_in_the_reference() -> None:
    text = _text(ROOT / "docs" / "cli.md")
    headings = _HEADING.findall(_FENCE.sub("", text))
    verbs = next(action.choices for action in build_parser()._subparsers._group_actions if action.choices)
    for verb, parser in verbs.items():
        assert verb in headings
        assert f"recoup {verb}" in _text(ROOT / "README.md")
        for option in (name for action in parser._actions for name in action.option_strings if name.startswith("--")):
            assert option in text, f"{verb} {option}"


def test_every_public_name_is_in_the_api_page() -> None:
    text = _text(ROOT / "docs" / "api.md")
    missing = [name for name in recoup.__all__ if not name.startswith("__") and not re.search(rf"\b{name}\b", text)]
    assert missing == []
