"""A drop-in for ``torch.utils.checkpoint.checkpoint`` that replays operations instead of running Python again."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from recoup.errors import CaptureError
from recoup.graph.site import site_of
from recoup.torch.capture import Captured, Version
from recoup.torch.live import LiveSession, outer_recomputes
from recoup.torch.naming import Namer, tensor_names
from recoup.torch.private import below_backward, in_functional_transform
from recoup.torch.traits import Traits

__all__ = ["RegionReport", "checkpoint"]

R = TypeVar("R")

_SMALLEST_DROPPED_BYTES = 1024
_inside = threading.local()


class RegionReport:
    """What one region did; hand one to ``checkpoint(..., report=...)`` to have it filled.

    Attributes:
        dropped_bytes: bytes of saved tensors that will be recomputed (a storage saved twice counts twice).
        copied_bytes: bytes copied because the region wrote in place what a replay will read.
        kept: why what was kept was kept: site to reason.
    """

    def __init__(self) -> None:
        self.dropped_bytes = 0
        self.copied_bytes = 0
        self.kept: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"RegionReport(dropped_bytes={self.dropped_bytes}, copied_bytes={self.copied_bytes}, kept={self.kept})"


def checkpoint(
    fn: Callable[..., R], *args: object, report: RegionReport | None = None, use_reentrant: bool | None = None, **kwargs: object
) -> R:
    """Run ``fn(*args, **kwargs)`` and recompute its activations in the backward pass instead of keeping them.

    Unlike ``torch.utils.checkpoint.checkpoint`` the Python of ``fn`` runs once: its operations are captured and
    replayed, so counters, caches, hooks and batch-norm statistics move once, and random numbers are those of the
    forward whatever generator they came from. What cannot be replayed safely is kept: results of collectives and of
    unknown operators, routing decisions, memory filled behind the dispatcher's back, tensors below 1 KiB.

    Inside of another region, ours or one of ``torch.utils.checkpoint``, it just calls ``fn``: the outer region recomputes.

    Args:
        fn: any callable; its result is returned as it is.
        report: filled with what was dropped and kept, and why.
        use_reentrant: accepted, so that existing calls need not change, and not used.

    Raises:
        ReplayMismatch: in the backward, if something that the recomputation reads has changed since.
        CaptureError: the region uses a functional transform that forbids saved-tensor hooks.
    """
    if not torch.is_grad_enabled() or below_backward() or getattr(_inside, "region", False) or outer_recomputes():
        return fn(*args, **kwargs)
    if in_functional_transform():
        warnings.warn(
            "recoup.torch.checkpoint inside a torch.func transform recomputes nothing: the transform saves tensors its own way",
            stacklevel=2,
        )
        return fn(*args, **kwargs)
    policy = _Everything(_name(fn), tensor_names(_modules_of(fn)))
    session = LiveSession(policy)
    try:
        _inside.region = True
        session.on()
        with session.hooks:
            return fn(*args, **kwargs)
    except RuntimeError as error:
        if "saved tensor hooks" in str(error):
            raise CaptureError(
                f"{policy.region}: a torch.func transform inside the region forbids saved-tensor hooks ({error}). "
                "Call the transform outside of checkpoint()."
            ) from error
        raise
    finally:
        session.off()
        _inside.region = False
        session.close()
        if report is not None:
            report.dropped_bytes, report.copied_bytes, report.kept = session.dropped_bytes, session.copied_bytes, policy.reasons


class _Everything:
    """Capture all that can be replayed without having been proven: operators of ATen that are deterministic given their inputs."""

    def __init__(self, region: str, names: Callable[[], dict[int, str]]) -> None:
        self.region = region
        self._namer = Namer(names, f"region {region}")
        self.counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def wants(self, traits: Traits) -> bool:
        self.counts[traits.name] += 1
        return True

    def rebuilds(self) -> bool:
        return True

    def site(self, traits: Traits) -> str:
        return site_of(self.region, 0, traits.name, self.counts[traits.name] - 1)

    def keeps(self, op: Captured, place: int, tensor: Tensor) -> str:
        if op.traits.decision and not tensor.is_floating_point():
            return "a decision (indices), which must not flip"
        namespace = getattr(op.func, "namespace", "")
        if namespace not in ("aten", "prims"):
            return f"operator of the namespace {namespace!r}: not known to give the same result twice"
        return ""

    def drops(self, version: Version, tensor: Tensor) -> bool:
        return version.nbytes >= _SMALLEST_DROPPED_BYTES

    def namer(self) -> Namer:
        return self._namer

    def kept(self, site: str, reason: str) -> None:
        self.reasons.setdefault(site, reason)


def _name(fn: object) -> str:
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _modules_of(fn: object) -> list[torch.nn.Module]:
    """The modules that a function is, is bound to, or closes over."""
    candidates = [fn, getattr(fn, "__self__", None), *(_contents(cell) for cell in getattr(fn, "__closure__", None) or ())]
    return [candidate for candidate in candidates if isinstance(candidate, torch.nn.Module)]


def _contents(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # the cell is still empty
        return None
