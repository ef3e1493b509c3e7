"""One call of a token-wise module, run in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from recoup.torch.live import outer_recomputes
from recoup.torch.private import below_backward
from recoup.torch.tile.pieces import Region, Unfit, tiled_call
from recoup.torch.tile.standing import is_replaced
from recoup.torch.views import is_plain

__all__ = ["ModuleRegion", "demand_fit", "run_module"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleRegion(Region):
    """A module's call, flattened to rows: a piece has as many dimensions as the whole, all leading ones but the last of size one."""

    def __init__(self, name: str, module: torch.nn.Module, tiles: int, like: Tensor) -> None:
        super().__init__(name, module, tiles, like.device)
        self.lead = (1,) * (like.dim() - 2)

    def run(self, rows: Tensor, start: int) -> Tensor:
        """The module on these rows.

        Raises:
            Unfit: it does not give one tensor with a row for each of these.
        """
        with self.autocast.entered():
            result = self.standing.call(rows.view(*self.lead, *rows.shape))
        if not isinstance(result, Tensor) or result.shape[:-1] != (*self.lead, rows.shape[0]):
            found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise Unfit(f"it gives {found} for {rows.shape[0]} rows")
        return result.reshape(rows.shape[0], result.shape[-1])


def run_module(
    name: str,
    module: torch.nn.Module,
    tiles: int,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    watch: Callable[[Region], object] | None = None,
) -> Tensor:
    """The call in pieces; ``watch`` is shown how.

    Raises:
        Unfit: it cannot be; nothing has been done.
        UsageError: the module writes its input in place.
    """
    whole = demand_fit(module, args, kwargs)
    region = ModuleRegion(name, module, tiles, whole)
    if watch is not None:
        watch(region)
    result = tiled_call(region, whole.reshape(-1, whole.shape[-1]))
    return result.view(*whole.shape[:-1], result.shape[-1])


def demand_fit(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """The one tensor of a call that may run in pieces.

    Raises:
        Unfit: the call is another one, or somebody watches what happens inside.
    """
    whole = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(whole, Tensor) or not is_plain(whole) or not whole.is_floating_point() or whole.dim() < 2:
        raise Unfit("it is called with something else than one tensor of rows")
    if whole.numel() == 0 or whole.shape[:-1].numel() < 2:
        raise Unfit("it is called with less than two rows")
    if below_backward():
        raise Unfit("it is called inside of a backward pass")
    if outer_recomputes():
        raise Unfit("it is called inside of torch.utils.checkpoint")
    if _has_any_global_hook():
        raise Unfit("hooks on all modules would run once for each piece")
    for part in module.modules():
        if is_replaced(part):
            raise Unfit(f"a {type(part).__name__} in it is compiled")
        if any(getattr(part, name) for name in _HOOKS):
            raise Unfit(f"a {type(part).__name__} in it has hooks, which would run once for each piece")
        if not all(is_plain(tensor) for table in (part._parameters, part._buffers) for tensor in table.values() if tensor is not None):
            raise Unfit(f"a {type(part).__name__} in it has parameters that are no plain tensors")
    return whole
