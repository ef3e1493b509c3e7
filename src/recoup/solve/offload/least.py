"""The least peak that a joint plan can be found for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recoup.simulate.index import replays
from recoup.solve.choice import droppable
from recoup.solve.descent import SIMULATION_OVERHEAD
from recoup.solve.least import least_judged
from recoup.solve.offload.judged import JointJudged, joined, judge_joint
from recoup.solve.offload.moves import Space
from recoup.solve.offload.search import Search, everything_out
from recoup.solve.strategy import Problem

__all__ = ["joint_least"]

_CACHE_KEY = "_recoup_joint_least"
# Simulated plans for each start: few for large steps, so that the work, counted in simulated operations, stays the same.
_TRIES, _FEW_TRIES, _WORK = 300, 20, 1_200_000


def joint_least(problem: Problem, spaces: Sequence[Space], recomputing: bool) -> JointJudged:
    """The plan with the least simulated peak that was found over these links; once found, kept on the graph."""
    known: dict[object, JointJudged] = problem.graph.__dict__.setdefault(_CACHE_KEY, {})
    key = problem.executor, recomputing, tuple((space.link, space.cap) for space in spaces)
    if key not in known:
        known[key] = _least(problem, spaces, recomputing)
    return known[key]


def _least(problem: Problem, spaces: Sequence[Space], recomputing: bool) -> JointJudged:
    index, executor = replays(problem.graph), problem.executor
    alone = joined(least_judged(problem)) if recomputing else judge_joint(index, frozenset(), executor)
    found = [alone]
    for space in spaces:
        search = Search(space, executor, 0, 0.0, lambda: 1.0)
        dropping = droppable(index, executor) if recomputing else frozenset()
        out = everything_out(space, executor)
        starts = [alone, out, judge_joint(index, dropping, executor, offload=out.offload)]
        if out.offload is not None and alone.recompute:
            rest = replace(out.offload, storages=out.offload.storages - alone.recompute)
            starts.append(judge_joint(index, alone.recompute, executor, alone.since, rest))
        tries = min(max(_WORK // (len(starts) * (SIMULATION_OVERHEAD + index.count)), _FEW_TRIES), _TRIES)
        found.extend(search.lowered(start, tries, 0) for start in starts)
    return min(found, key=lambda one: (one.peak_bytes, one.step_seconds))
