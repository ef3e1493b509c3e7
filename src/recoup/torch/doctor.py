"""Does the installed PyTorch behave as Recoup expects? One check for each private interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from recoup.cost import OffloadLink
from recoup.torch.private import TESTED_TORCH, self_test

__all__ = ["Check", "doctor", "offload_links"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was tried, whether it works, and more in words."""

    name: str
    passed: bool
    detail: str


def doctor() -> list[Check]:
    """Try what Recoup leans on."""
    from recoup.torch.compiled.interfaces import self_test as test_compiler  # loads the compiler, which nothing else here needs

    version = ".".join(str(torch.__version__).split(".")[:2])
    tested = version in TESTED_TORCH
    checks = [Check("tested version of torch", tested, f"{torch.__version__}; tested: {', '.join(TESTED_TORCH)}")]
    checks += [Check(name, works, detail) for name, works, detail in (*self_test(), *test_compiler())]
    return [*checks, Check("CUDA", True, _cuda())]


def offload_links(directory: Path) -> tuple[Check, list[OffloadLink]]:
    """How a directory's disk is reached, and the measured links of this machine: to that directory, and to the host's memory from CUDA.

    Raises:
        OffloadError: the directory cannot be used.
    """
    from recoup.torch.offload.files import filesystem_of, open_spool
    from recoup.torch.offload.measure import measure_disk, measure_host

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    file = open_spool(directory)
    way = "past the page cache" if file.direct else "through the page cache: this filesystem has no direct access"
    file.close()
    kind = filesystem_of(directory) or "an unknown filesystem"
    links = [measure_disk(directory, device=device), *measure_host(device)]
    return Check("offload to disk", True, f"{directory} on {kind}, {way}"), links


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "no device; Recoup's CUDA paths are written but have not been measured on one"
    return f"{torch.cuda.get_device_name()}; Recoup's CUDA paths have not been measured on one"
