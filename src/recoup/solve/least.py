"""The least peak that a plan can be found for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities
from recoup.simulate.index import replays
from recoup.solve.checkmate import Checkmate
from recoup.solve.descent import SIMULATION_OVERHEAD, Judged, judge, judge_choice, tries_for
from recoup.solve.hierarchy import links_of
from recoup.solve.holds import can_wait
from recoup.solve.lowering import lower_peak
from recoup.solve.named import NAMED
from recoup.solve.program import Program
from recoup.solve.rows import Rows
from recoup.solve.shaken import shaken
from recoup.solve.strategy import Choice, Problem
from recoup.solve.windows import windows

__all__ = ["least_judged", "least_peak"]

_CACHE_KEY = "_recoup_least"
_ROUNDS = 8
_LARGE = 500
_FEW = 24
# Fixed amounts of work, not of time, so that the same step always has the same least peak.
_NODES = 400
_SECONDS = 30.0
_TOLERANCE = 2e-3
# Local search through higher peaks, in simulated operations: for each storage that can be dropped, and at most.
_SHAKES, _MOST_SHAKES = 12, 600_000


def least_peak(graph: StepGraph, executor: Capabilities = LIVE) -> tuple[int, Choice]:
    """The least simulated peak found, in bytes, and the choice that has it."""
    found = least_judged(Problem(graph, None, executor))
    return found.peak_bytes, found.choice


def least_judged(problem: Problem) -> Judged:
    """The plan with the least simulated peak that programs, named strategies and local search find; once found, kept on the graph.

    Whoever asks first, and however long the operations took when the step was recorded, the answer is the same: the search counts
    every operation as one second, and the peak does not depend on what an executor's overheads are, only on what it can run.
    """
    known: dict[tuple[bool, ...], Choice] = problem.graph.__dict__.setdefault(_CACHE_KEY, {})
    reach = _reach(problem.executor)
    if reach not in known:
        _find(Problem(_timeless(problem.graph), None, problem.executor), known)
    return judge_choice(replays(problem.graph), known[reach], problem.executor)


def _reach(executor: Capabilities) -> tuple[bool, ...]:
    return executor.keeps_unsaved, executor.replays_random, executor.rebuilds_again


def _timeless(graph: StepGraph) -> StepGraph:
    return structs.replace(graph, ops=tuple(structs.replace(op, seconds=1.0) for op in graph.ops))


def _find(problem: Problem, known: dict[tuple[bool, ...], Choice]) -> Choice:
    """The choice with the least peak for what the executor can run, and before that for what a narrower one can."""
    reach, narrower = _reach(problem.executor), _narrower(problem.executor)
    if reach not in known:
        # Whatever a narrower executor can run, this one can too, and the narrower search may go deeper.
        starts = () if narrower is None else (_find(replace(problem, executor=narrower), known),)
        standing = next((gear for gear in (LIVE, STATIC) if _reach(gear) == reach), problem.executor)
        known[reach] = _least(replace(problem, executor=standing), starts).choice
    return known[reach]


def _least(problem: Problem, others: Sequence[Choice]) -> Judged:
    index, executor = replays(problem.graph), problem.executor
    frame = windows(index, executor)
    program, rows = Program(index, executor, frame), Rows(index, frame)
    starts = [judge(index, strategy.choose(problem).recompute, executor) for strategy in NAMED]
    starts.append(judge(index, frame.dropping, executor))
    starts.append(judge(index, frame.needed, executor))
    starts.extend(judge_choice(index, other, executor) for other in others)
    if can_wait(index):
        starts.append(links_of(index, executor).least())
    if len(frame.dropping) <= _FEW:
        # Whatever the peak, it is above one byte: the program of the whole schedule answers with the least.
        starts.append(judge_choice(index, Checkmate(nodes=_NODES).choose(replace(problem, budget_bytes=1)), executor))
    best = min(starts, key=_rank)
    for found in starts:
        rows.learn(found.run, 0)
    _add(rows, frame.needed, frozenset())
    _add(rows, frozenset(), frame.needed)
    # Where a chain gives deep plans, the program, which knows of none, is no help in a large step.
    for _ in range(_ROUNDS if len(frame.dropping) <= _LARGE or not can_wait(index) else 0):
        solution = program.solve([*rows.proven.values(), *rows.estimated()], None, _SECONDS, _TOLERANCE, _NODES)
        if solution.recompute is None:
            break
        found = judge(index, solution.recompute, executor)
        kept = (frame.needed - solution.recompute) | solution.held
        fresh = _add(rows, kept, solution.recompute & frame.needed)
        known = len(rows.learned)
        rows.learn(found.run, int(found.peak_bytes * 0.98))
        better = _rank(found) < _rank(best)
        best = found if better else best
        if not better and not fresh and len(rows.learned) == known:
            break
    best = lower_peak(index, best, executor, frame.dropping, tries_for(best))
    if len(frame.dropping) > _LARGE:
        return best
    work = min(_MOST_SHAKES, _SHAKES * len(frame.dropping) * (SIMULATION_OVERHEAD + index.count))
    return shaken(index, best, executor, frame.dropping, work)


def _narrower(executor: Capabilities) -> Capabilities | None:
    """This executor without random replays and unsaved leaves; None if it has neither."""
    if not (executor.keeps_unsaved or executor.replays_random):
        return None
    return structs.replace(executor, keeps_unsaved=False, replays_random=False)


def _rank(found: Judged) -> tuple[int, float]:
    return found.peak_bytes, found.step_seconds


def _add(rows: Rows, kept: frozenset[int], recomputed: frozenset[int]) -> int:
    profile = rows.profile(kept, recomputed)
    return rows.add_proven(kept, recomputed, int(profile.max(initial=0) * 0.9))
