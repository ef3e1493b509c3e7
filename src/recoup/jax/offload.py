"""Offloading: of what a plan makes again, what comes back sooner over the link waits in the host's memory instead.

A value of ``b`` bytes takes ``b / bandwidth`` seconds each way. The way out hides behind the forward and the way back behind the
backward as long as the link has time left there; what does not fit behind it is charged. A value is offloaded if its charge is less than
the seconds in which it would be made again. Values that other replays start from stay as they are, and so do loops' bodies.

On a CPU there is one memory, and XLA drops the transfers: the logic is tested there, and nothing of it has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.jax.figures import kept_storages
from recoup.jax.recording import Recording
from recoup.plan import Decision, Plan
from recoup.plan.capabilities import JIT
from recoup.simulate import plan_holds, plan_ids, simulate
from recoup.simulate.index import replays

__all__ = ["Link", "with_offload"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a device's memory and the host's.

    Attributes:
        bytes_per_second: of one direction.
    """

    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise UsageError(f"a link needs a bandwidth above 0 bytes a second, got {self.bytes_per_second}")


def with_offload(recording: Recording, plan: Plan, link: Link) -> Plan:
    """The plan with values offloaded that would be made again more slowly; the plan itself where none is.

    Offloaded values take on the device what values made again take, and are not made again: the step takes no more memory and
    no more time than before, by the simulation.
    """
    if recording.loops or plan.drops_nothing:
        return plan
    graph = recording.graph
    chosen = _chosen(graph, plan, link)
    if not chosen:
        return plan
    left = plan_ids(graph, plan) - chosen.keys()
    holds = {v: u for v, u in plan_holds(graph, plan).items() if v in left and u in left}
    seconds = simulate(_without_work(graph, frozenset(chosen)), plan_ids(graph, plan), JIT, holds).step_seconds + sum(chosen.values())
    if seconds >= plan.step_seconds:
        return plan
    sites = {graph.storages[v].site: v for v in chosen}
    return msgspec.structs.replace(
        plan,
        step_seconds=seconds,
        bound_seconds=0.0,
        gap=None,
        decisions=(*_rest(plan, sites), *(_decision(graph, site, v, chosen[v]) for site, v in sites.items())),
    )


def _chosen(graph: StepGraph, plan: Plan, link: Link) -> dict[int, float]:
    """Storages to offload, each with the seconds that its transfers are not hidden."""
    index, recompute = replays(graph), plan_ids(graph, plan)
    read = {u for v in recompute for u in index.inputs_of[v]}
    waiting = {storage for pair in plan_holds(graph, plan).items() for storage in pair}
    spare = sum(op.seconds for op in graph.ops if op.phase == "forward")
    found: dict[int, float] = {}
    candidates = [v for v in recompute if index.saves_of[v] and v not in read and v not in waiting]
    for v in sorted(candidates, key=lambda v: (-_seconds(graph, index.ops_of[v]) / max(index.bytes[v], 1), v)):
        one_way = index.bytes[v] / link.bytes_per_second
        charge = 2 * max(one_way - spare, 0.0)
        if charge < _seconds(graph, index.ops_of[v]):
            spare = max(spare - one_way, 0.0)
            found[v] = charge
    # What was kept only for replays of these need not be kept any more; the plan counts it, which is no less than the truth.
    assert kept_storages(graph, recompute - found.keys()) >= found.keys()
    return found


def _seconds(graph: StepGraph, ops: tuple[int, ...]) -> float:
    return sum(graph.ops[op].seconds for op in ops)


def _without_work(graph: StepGraph, offloaded: frozenset[int]) -> StepGraph:
    """The graph in which making these again takes no time, the step's own time kept."""
    index = replays(graph)
    free = {op for v in offloaded for op in index.ops_of[v]}
    ops = tuple(msgspec.structs.replace(op, seconds=0.0) if op.id in free else op for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops, step_seconds=index.base_seconds)


def _rest(plan: Plan, sites: dict[str, int]) -> list[Decision]:
    """The decisions without those on these sites, ranges taken apart where one of theirs goes."""
    from recoup.graph.site import expand

    rest: list[Decision] = []
    for decision in plan.decisions:
        names = expand(decision.site)
        if not sites.keys() & set(names):
            rest.append(decision)
            continue
        holds, share = decision.holds, decision.bytes // len(names)
        rest.extend(
            msgspec.structs.replace(decision, site=name, bytes=share, held_from=holds.get(name, "")) for name in names if name not in sites
        )
    return rest


def _decision(graph: StepGraph, site: str, v: int, charge: float) -> Decision:
    why = "comes back over the link behind the backward" if not charge else "comes back over the link sooner than it is made again"
    return Decision(site=site, action="offload", bytes=graph.storages[v].bytes, why=why)
