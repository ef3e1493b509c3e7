"""The tiled calls of one applied plan: which module calls to take over, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from recoup.errors import PlanMismatch
from recoup.graph.tiles import LOSS, loss_site
from recoup.torch.tile.deferred import Head, Rows, defer
from recoup.torch.tile.module import ModuleRegion, demand_fit, run_module
from recoup.torch.tile.pieces import Region, Unfit

__all__ = ["Tiler"]

Call = Callable[..., object]


class Tiler:
    """Runs modules in tiles.

    Args:
        model: whose modules they are.
        tiles: pieces by module path, or by ``loss_site`` of a head.
        apart: entered around what runs inside of a tiled call.

    Raises:
        PlanMismatch: the model has no such module.
    """

    def __init__(self, model: torch.nn.Module, tiles: Mapping[str, int], apart: Callable[..., AbstractContextManager[object]]) -> None:
        modules = dict(model.named_modules())
        self.apart = apart
        self.calls: Counter[str] = Counter()
        self.kept: dict[str, str] = {}
        # Shown every loss that runs in tiles.
        self.watch: Callable[[str, Region, Tensor], object] | None = None
        self._modules: dict[str, tuple[torch.nn.Module, int]] = {}
        self._heads: dict[str, tuple[torch.nn.Module, int]] = {}
        for site, count in tiles.items():
            path = site.removesuffix(LOSS)
            if path not in modules:
                raise PlanMismatch(f"the plan runs {site} in tiles, but the model has no module {path!r}; was it made for another model?")
            (self._heads if site.endswith(LOSS) else self._modules)[path] = (modules[path], count)

    def __contains__(self, path: str) -> bool:
        return path in self._modules or path in self._heads

    def call(self, path: str, inner: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The call of a module of the plan, in tiles if it can be."""
        site = path if path in self._modules else loss_site(path)
        if torch.is_grad_enabled():
            try:
                with self.apart(counting=path in self._modules):
                    if path in self._modules:
                        module, count = self._modules[path]
                        result = run_module(path or "the model", module, count, args, kwargs)
                        self.calls[site] += 1
                        return result
                    return self._deferred(path, args, kwargs)
            except Unfit as reason:
                self.kept.setdefault(site, f"not run in tiles: {reason}")
        return inner(*args, **kwargs)

    def _deferred(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
        module, count = self._heads[path]
        whole = demand_fit(module, args, kwargs)
        region = ModuleRegion(path or "the model", module, count, whole)
        with torch.no_grad():
            row = region.run(whole.detach().reshape(-1, whole.shape[-1])[:1], 0)
        site = loss_site(path)

        def told(reason: str) -> None:
            self.kept.setdefault(site, f"not run in tiles: {reason}")

        def tiled(loss: Region, rows: Tensor) -> None:
            self.calls[site] += 1
            if self.watch is not None:
                self.watch(site, loss, rows)

        head = Head(region, whole, torch.Size((*whole.shape[:-1], row.shape[-1])), self.apart, told, tiled)
        return defer(Rows(head, whole), row.dtype)
