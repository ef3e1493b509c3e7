"""What an applied plan has done so far, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What an applied plan has done so far.

    Attributes:
        gear: the gear asked for.
        live_calls, static_calls, plain_calls: outermost calls by how they ran.
        dropped_bytes: bytes of saved tensors handed back for recomputation, all calls together.
        replayed_ops: operations replayed in backward passes of live calls that are over.
        copied_bytes: bytes copied because something was written in place that a replay reads.
        offloaded_bytes, fetched_bytes: bytes that were sent out of memory, and that were fetched back.
        waited_seconds: what steps waited for offloaded activations to leave or to come back.
        sites_expected, sites_met: the plan's operations in the module calls that were made, and how many of them came.
        kept: what the plan drops and had to be kept, with the reason.
        unplanned_shapes: input shapes that came without a plan of their own.
        tiled_calls: module calls, and losses, that ran in tiles.
        static_refusals: why calls did not run in the static gear, by reason, with how often.
    """

    gear: str
    live_calls: int = 0
    static_calls: int = 0
    plain_calls: int = 0
    dropped_bytes: int = 0
    copied_bytes: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    waited_seconds: float = 0.0
    sites_expected: int = 0
    sites_met: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    unplanned_shapes: tuple[str, ...] = ()
    tiled_calls: int = 0
    static_refusals: dict[str, int] = field(default_factory=dict)
