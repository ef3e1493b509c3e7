"""Does the installed PyTorch behave as Recoup expects? One check for each private interface."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recoup.torch.private import TESTED_TORCH, self_test

__all__ = ["Check", "doctor"]


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


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "no device; Recoup's CUDA paths are written but have not been measured on one"
    return f"{torch.cuda.get_device_name()}; Recoup's CUDA paths have not been measured on one"
