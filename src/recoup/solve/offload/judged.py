"""A joint choice, simulated: the one way in which searches for offloads look at a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import ALWAYS, Run
from recoup.simulate.offload import Offload, waiting_bytes
from recoup.solve.choice import runnable
from recoup.solve.descent import Judged
from recoup.solve.holds import held_from
from recoup.solve.strategy import Choice

__all__ = ["JointJudged", "joined", "judge_joint"]


@dataclass(frozen=True, slots=True, eq=False)
class JointJudged(Judged):
    """A choice with its simulated peak and time, and what it offloads."""

    offload: Offload | None = None

    @property
    def choice(self) -> Choice:
        """This, as a strategy answers."""
        return Choice(self.recompute, held_from=self.run.held_from, offload=self.offload)

    @property
    def offloaded(self) -> frozenset[int]:
        """What waits on the host or on disk."""
        return self.offload.storages if self.offload is not None else frozenset()

    @property
    def offloaded_bytes(self) -> int:
        """What that takes there."""
        return 0 if self.offload is None else waiting_bytes(self.run.index, self.offload.link, self.offloaded)

    @property
    def joint_key(self) -> object:
        """What tells two choices apart."""
        moving = self.offload
        return self.key, self.offloaded, (moving.write_window_bytes, moving.read_window_bytes) if moving is not None else None


def judge_joint(
    index: Replays, recompute: frozenset[int], executor: Capabilities, since: Mapping[int, int] = ALWAYS, offload: Offload | None = None
) -> JointJudged:
    """The choice, made runnable, and simulated; an offload of nothing is none."""
    moving = offload if offload is not None and offload.storages else None
    away = moving.storages if moving is not None else frozenset()
    chosen = runnable(index, recompute - away, executor)
    waits = {v: moment for v, moment in since.items() if v in chosen}
    run = Run(index, chosen, held_from(index, chosen, waits), moving)
    return JointJudged(chosen, int(run.bytes_at.max(initial=0)), run.seconds(executor), run, waits, moving)


def joined(found: Judged) -> JointJudged:
    """A choice that offloads nothing."""
    return JointJudged(found.recompute, found.peak_bytes, found.step_seconds, found.run, found.since, None)
