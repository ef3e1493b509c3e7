"""Models by name: the public ones that published figures are about, from ``presets.json`` beside this module."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources

import msgspec

from recoup.errors import UsageError
from recoup.job.model import Model

__all__ = ["preset", "preset_names"]


def preset(name: str) -> Model:
    """A model by name.

    Raises:
        UsageError: no preset has that name; the message lists those there are.
    """
    known = _known()
    key = name.lower()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"no preset is called {name!r}{hint}; there are {', '.join(known)}")
    return known[key]


def preset_names() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(_known())


@cache
def _known() -> dict[str, Model]:
    data = resources.files("recoup.job").joinpath("presets.json").read_bytes()
    return {item.name: item for item in msgspec.json.decode(data, type=tuple[Model, ...])}
