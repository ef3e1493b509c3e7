"""The audit of losses: the whole step with cross-entropies in pieces beside the plain one, all gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from recoup.graph.tiles import Sample
from recoup.torch.private import below_backward
from recoup.torch.state import Snapshot
from recoup.torch.tile.audit import Verdict, allowed, apart, intercepted, sampled
from recoup.torch.tile.pieces import Region
from recoup.torch.tile.tiler import Tiler

__all__ = ["audit_losses"]

_PIECES = 3
_RESULT_BYTES = 40  # for each row: what the reduction of its loss holds until the backward


def audit_losses(
    sites: set[str], step: Callable[[], object], model: torch.nn.Module, snapshot: Snapshot, narrowest: torch.dtype | None = None
) -> dict[str, Verdict]:
    """For each site of a loss what the audit found. The step runs twice, from the snapshot's state, which stands again at the end.

    ``narrowest`` is the narrowest dtype that the regions compute in, where that is not the one of the gradients.
    """
    with _gradients(model) as plain:
        step()
    snapshot.restore()
    bench = _Bench(model, sites)
    with _gradients(model) as split:
        failure = bench.run(step)
    snapshot.restore()
    if failure:
        return {site: Verdict(failure) for site in sites}
    worst, wrong = _compared(plain, split, narrowest)
    found = {}
    for site in sites:
        reason = wrong or bench.tiler.kept.get(site, "") or ("" if site in bench.samples else "its loss did not run in tiles")
        found[site] = Verdict(reason, worst, bench.samples.get(site, ()))
    return found


class _Bench:
    """The model with its losses in pieces, and samples of each."""

    def __init__(self, model: torch.nn.Module, sites: set[str]) -> None:
        self.model = model
        self.busy = False
        self.samples: dict[str, tuple[Sample, ...]] = {}
        self.tiler = Tiler(model, dict.fromkeys(sites, _PIECES), self.apart)
        self.tiler.watch = self._watch

    def run(self, step: Callable[[], object]) -> str:
        """Why the step fails, '' if it does not."""
        try:
            with intercepted(self.model, self._around):
                step()
        except Exception as error:  # whatever the step raises when it is given logits that are not there
            return f"the step fails with it in tiles: {type(error).__name__}: {error}"
        return ""

    @contextmanager
    def apart(self, counting: bool = False) -> Generator[None]:
        """What runs inside is part of one tiled call."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _watch(self, site: str, region: Region, rows: Tensor) -> None:
        if site not in self.samples:
            self.samples[site] = sampled(region, rows, _RESULT_BYTES)

    def _around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if self.busy or below_backward() or path not in self.tiler:
            return inner(*args, **kwargs)
        return self.tiler.call(path, inner, args, kwargs)


def _compared(plain: Mapping[str, Tensor], split: Mapping[str, Tensor], narrowest: torch.dtype | None) -> tuple[float, str]:
    """The largest relative difference of any gradient, and what is wrong, '' if nothing is."""
    worst = 0.0
    for name, one in plain.items():
        found, limit = apart(one, split.get(name)), allowed(one, narrowest)
        if found > limit:
            return found, f"with it in tiles the gradient of {name} is {found:.1e} apart, {limit:.1e} is allowed"
        worst = max(worst, found)
    return worst, ""


@contextmanager
def _gradients(model: torch.nn.Module) -> Generator[dict[str, Tensor]]:
    """The gradients that come while this is open, copied."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().clone()

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(note(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
