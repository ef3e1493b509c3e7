"""recoup doctor: say what is installed here and whether it does what Recoup relies on.

The allocator's meter is tried on a known allocation, and each private interface of PyTorch in use tests itself. With a directory for
offloaded activations, the links that they would take are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recoup import __version__
from recoup.cli.console import Console
from recoup.errors import MissingExtra

if TYPE_CHECKING:
    from recoup.cost import OffloadLink
    from recoup.report.text import Checked

__all__ = ["configure", "run"]

_PACKAGES = ("numpy", "msgspec", "highspy", "rich", "torch", "transformers", "jax", "jaxlib", "flax", "equinox", "matplotlib")
_PROBE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    passed: bool
    detail: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the directory."""
    parser.set_defaults(source=None)
    parser.add_argument(
        "--offload-dir",
        metavar="DIR",
        type=Path,
        help="measure the links that offloaded activations would take: to a disk at DIR, and between a CUDA device and the host",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Reports versions, self-tests and measured links; 1 if a test fails."""
    import platform

    import msgspec

    from recoup.cli.facts import check_facts
    from recoup.report.links import links_table
    from recoup.report.text import checks_table

    versions = {"recoup": __version__, "python": platform.python_version(), **dict(_installed())}
    settings: dict[str, str] = {}
    checks: list[Checked] = []
    # First, before the self-tests keep the machine busy, and so that a directory that will not do is refused at once.
    access, links = ([], []) if args.offload_dir is None else _offload_links(args.offload_dir, versions)
    if "torch" in versions:
        settings, checks = _torch_settings(), [*_torch_checks()]
    if "jax" in versions:
        checks.extend(_jax_checks())
    if not checks:
        checks = [_Check("front-end", False, "none installed: pip install 'recoup[torch]' or pip install 'recoup[jax]'")]
    checks.extend(access)
    facts = {"versions": versions, "settings": settings, "checks": check_facts(checks)}
    if links:
        facts["links"] = msgspec.to_builtins(links)
    lines = "\n".join(f"{name} {value}" for name, value in (versions | settings).items())
    console.data(facts, lines, "", checks_table(checks), *(("", links_table(links)) if links else ()))
    return 0 if all(check.passed for check in checks) else 1


def _installed() -> Iterator[tuple[str, str]]:
    from importlib import metadata

    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _torch_settings() -> dict[str, str]:
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return {"threads": str(torch.get_num_threads()), "device": str(device)}


def _torch_checks() -> Sequence[Checked]:
    from recoup.torch import doctor

    return [_meter_check(), *doctor()]


def _offload_links(directory: Path, versions: dict[str, str]) -> tuple[list[Checked], list[OffloadLink]]:
    if "torch" not in versions:
        raise MissingExtra("links for offloaded activations are measured with PyTorch, which is not installed: pip install 'recoup[torch]'")
    from recoup.torch.doctor import offload_links

    check, links = offload_links(directory)
    return [check], links


def _jax_checks() -> Iterator[Checked]:
    import jax
    from recoup.jax import jaxprs, ties

    yield from (_Check(*found) for found in jaxprs.self_test())
    backend = jax.default_backend()
    yield _Check("tying recomputation", True, f"by {ties.way_of(backend)} on {backend}")


def _meter_check() -> _Check:
    import torch

    from recoup.torch.meter import meter_for

    seen = meter_for(torch.device("cpu")).peak_above(lambda: torch.empty(_PROBE_BYTES, dtype=torch.uint8))
    return _Check("allocator meter", seen == _PROBE_BYTES, f"saw {seen} of {_PROBE_BYTES} bytes on cpu")
