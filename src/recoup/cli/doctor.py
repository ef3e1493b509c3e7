"""recoup doctor: say what is installed here and whether it does what Recoup relies on.

The allocator's meter is tried on a known allocation, and each private interface of PyTorch in use tests itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recoup import __version__
from recoup.cli.console import Console

if TYPE_CHECKING:
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
    """This verb has no arguments of its own."""
    parser.set_defaults(source=None)


def run(args: argparse.Namespace, console: Console) -> int:
    """Reports versions and self-tests; 1 if a test fails."""
    import platform

    from recoup.cli.facts import check_facts
    from recoup.report.text import checks_table

    versions = {"recoup": __version__, "python": platform.python_version(), **dict(_installed())}
    settings: dict[str, str] = {}
    checks: list[Checked] = []
    if "torch" in versions:
        settings, checks = _torch_settings(), [*_torch_checks()]
    if "jax" in versions:
        checks.extend(_jax_checks())
    if not checks:
        checks = [_Check("front-end", False, "none installed: pip install 'recoup[torch]' or pip install 'recoup[jax]'")]
    facts = {"versions": versions, "settings": settings, "checks": check_facts(checks)}
    lines = "\n".join(f"{name} {value}" for name, value in (versions | settings).items())
    console.data(facts, lines, "", checks_table(checks))
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
