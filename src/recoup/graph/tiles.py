"""Token-wise regions of a step: calls that give for each row of their input what that row alone decides.

A region may run in *tiles*, pieces of rows, each recomputed in the backward; ``recoup.graph.tiled`` says what the step is then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["LOSS", "Sample", "TileRegion", "loss_site", "scratch_bytes"]

LOSS = "/cross_entropy"


def loss_site(path: str) -> str:
    """The name of a vocabulary projection, by its module path, with the cross-entropy that follows it."""
    return path + LOSS


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What pieces of some size were measured to need, above what they read and what the whole call gives back.

    Attributes:
        rows: of a piece.
        forward_bytes: at the worst moment of a forward in such pieces.
        backward_bytes: at the worst moment of a backward in such pieces, sums of weight gradients beyond the gradients themselves included.
    """

    rows: int
    forward_bytes: int
    backward_bytes: int


class TileRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of a token-wise region, as the audit found it.

    Attributes:
        site: the module's path, or ``loss_site`` of a vocabulary projection.
        call: how many calls of it came before in the step.
        rows: of its input.
        source: the storage that its input lies on.
        forward: its operations in the forward, in order.
        backward: the operations of the backward that belong to them, in order.
        saves: what autograd packed inside of it.
        samples: measured pieces, the largest first.
        error: largest difference that splitting made in values or gradients, relative to the largest of them; 0 if equal bit for bit.
        reason: why it is not run in tiles, '' if it may be.
    """

    site: str
    call: int = 0
    rows: int = 0
    source: int = -1
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    error: float = 0.0
    reason: str = ""


def scratch_bytes(samples: Sequence[Sample], rows: int) -> tuple[int, int]:
    """Bytes that pieces of so many rows need in the forward and in the backward.

    The bytes are the most of several moments, each affine in the rows, so they are convex: between two samples their chord is
    never too low, and below the smallest sample that one is.
    """
    ordered = sorted(samples, key=lambda sample: sample.rows)
    if not ordered:
        return 0, 0
    if rows <= ordered[0].rows or len(ordered) == 1:
        factor = max(rows / ordered[0].rows, 1.0)
        return round(ordered[0].forward_bytes * factor), round(ordered[0].backward_bytes * factor)
    upper = next((place for place, sample in enumerate(ordered) if sample.rows >= rows), len(ordered) - 1)
    low, high = ordered[max(upper - 1, 0)], ordered[upper]
    share = (rows - low.rows) / (high.rows - low.rows)
    return (
        round(low.forward_bytes + share * (high.forward_bytes - low.forward_bytes)),
        round(low.backward_bytes + share * (high.backward_bytes - low.backward_bytes)),
    )
