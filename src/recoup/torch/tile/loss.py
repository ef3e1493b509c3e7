"""Cross-entropy of deferred logits, in pieces: each piece computes its logits, takes its losses, and lets them go.

A piece runs once without a graph in the forward and once more with one in the backward; nothing of it is kept between.
Keeping the gradients from the forward instead would save the second run, and would hold a gradient of the head's weight from
there on, be right for one upstream gradient only, and underflow in float16. The losses come out row by row, so that any
reduction, and any upstream gradient, is autograd's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recoup.torch.tile.deferred import Deferred, HeadRegion
from recoup.torch.tile.pieces import Autocast, Region, Unfit, tiled_call
from recoup.torch.views import is_plain

__all__ = ["LossRegion", "cross_entropy"]

_IGNORED = -100


class LossRegion(Region):
    """From features to the losses of their rows."""

    def __init__(self, logits: HeadRegion, targets: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> None:
        self.name, self.module, self.tiles = f"the loss of {logits.name}", logits.module, logits.tiles
        self.standing = logits.standing
        self.autocast = Autocast(targets.device.type)
        self.logits = logits
        self.targets = targets
        self.weight = weight
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.others = (targets,) if weight is None else (targets, weight)

    def run(self, rows: Tensor, start: int) -> Tensor:
        """The loss of each row."""
        logits = self.logits.run(rows, start)
        with self.autocast.entered():
            return F.cross_entropy(
                logits,
                self.targets[start : start + rows.shape[0]],
                self.weight,
                ignore_index=self.ignore_index,
                reduction="none",
                label_smoothing=self.label_smoothing,
            )


def cross_entropy(
    input: Deferred,
    target: object,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> object:
    """``torch.nn.functional.cross_entropy`` without the logits; ``NotImplemented`` where it takes the values."""
    rows = input.rows
    if size_average is not None or reduce is not None or reduction not in ("none", "sum", "mean"):
        return NotImplemented
    if not _fits(input, target, weight):
        return NotImplemented
    assert isinstance(target, Tensor)
    rows.head.demand_unchanged()
    flat = target.reshape(-1)
    with rows.head.apart():
        region = LossRegion(rows.region, flat, weight, ignore_index, label_smoothing)
        features = rows.features.reshape(-1, rows.features.shape[-1])
        try:
            losses = tiled_call(region, features)
        except Unfit:
            return NotImplemented
        rows.head.tiled(region, features)
        if reduction == "none":
            return losses.view(target.shape)
        return _reduced(losses, flat, weight, ignore_index, reduction, label_smoothing)


def _fits(logits: Deferred, target: object, weight: Tensor | None) -> bool:
    """Whether these are class indices, one for each row, and class weights without a gradient."""
    if not isinstance(target, Tensor) or not is_plain(target) or target.dtype is not torch.int64 or target.device != logits.device:
        return False
    if logits.dim() != (3 if logits.rows.classes_first else 2) or target.shape != logits.rows.features.shape[:-1] or not target.numel():
        return False
    return weight is None or (is_plain(weight) and not weight.requires_grad)


def _reduced(losses: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float) -> Tensor:
    kept = targets != ignore_index
    if weight is None and not label_smoothing:
        # The same kernel adds the same numbers in the same order as without tiles.
        return F.nll_loss(-losses.unsqueeze(1), torch.where(kept, 0, _IGNORED), ignore_index=_IGNORED, reduction=reduction)
    if reduction == "sum":
        return losses.sum()
    if weight is None:
        return losses.sum() / kept.sum()
    return losses.sum() / torch.where(kept, weight[torch.where(kept, targets, 0)], 0).sum()
