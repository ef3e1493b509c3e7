"""What an executor can run, stated before the solver starts, and what it costs.

Nothing is planned that the executor cannot run, and nothing is lost silently on the way.
"""

from __future__ import annotations

import msgspec

__all__ = ["COMPILED", "JIT", "LIVE", "STATIC", "Capabilities", "capabilities", "gears_of"]


class Capabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An executor's reach and overheads.

    Attributes:
        name: the gear: ``live``, ``static``, ``compiled`` or ``jit``.
        keeps_unsaved: can hold, for a replay, an activation that autograd itself does not save.
        replays_random: can replay operations flagged ``random`` (their generator state is captured).
        rebuilds_again: can let copies of a storage go and rebuild it later again.
        offload_targets: where storages can be offloaded to, by a plan that says how they move (``Plan.traffic``).
        capture_seconds: added to every forward operation of a module call in which something is captured.
        replay_seconds: added to every replayed operation, beyond the operation's own seconds.
        pack_seconds: added to every save while anything is dropped.
    """

    name: str
    keeps_unsaved: bool
    replays_random: bool
    rebuilds_again: bool = True
    offload_targets: tuple[str, ...] = ()
    capture_seconds: float = 0.0
    replay_seconds: float = 0.0
    pack_seconds: float = 0.0


# Overheads measured by benchmarks/overhead.py (its model of small operations) on a slow cloud core; faster ones pay a third.
LIVE = Capabilities(
    name="live", keeps_unsaved=True, replays_random=True, offload_targets=("host", "disk"),
    capture_seconds=50e-6, replay_seconds=27e-6, pack_seconds=8e-6,
)  # fmt: skip
STATIC = Capabilities(
    name="static", keeps_unsaved=False, replays_random=False, offload_targets=("host", "disk"),
    capture_seconds=0.0, replay_seconds=25e-6, pack_seconds=7.5e-6,
)  # fmt: skip
# JAX: the plan is compiled in, and what is made again is fused, so that an operation adds next to nothing of its own.
JIT = Capabilities(name="jit", keeps_unsaved=True, replays_random=True, replay_seconds=1e-7)

# Replays are operations of the compiled graph like all others: they cost what the graph says, and nothing more.
COMPILED = Capabilities(name="compiled", keeps_unsaved=True, replays_random=True, offload_targets=("host", "disk"))
_BY_FRONTEND = {"torch-eager": (LIVE, STATIC), "torch-compile": (COMPILED,), "jax": (JIT,)}


def gears_of(frontend: str) -> tuple[Capabilities, ...]:
    """The executors that can run plans for a front-end's graphs; for graphs of no front-end, those of eager PyTorch."""
    return _BY_FRONTEND.get(frontend, (LIVE, STATIC))


def capabilities(gear: str) -> Capabilities:
    """The capabilities of a gear by name.

    Raises:
        KeyError: no gear has that name.
    """
    return {executor.name: executor for executors in _BY_FRONTEND.values() for executor in executors}[gear]
