"""From a simulated choice to a plan: decisions by site, collapsed over identical layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from recoup.graph import StepGraph, Storage
from recoup.graph.site import collapse, collapse_pairs, op_name
from recoup.plan import Capabilities, Decision, Plan
from recoup.plan.plan import Action
from recoup.simulate import ALWAYS, Simulation, plan_holds, plan_ids, plan_offload
from recoup.simulate.index import Replays, replays
from recoup.solve.binding import binding_in_words
from recoup.solve.offload.words import offload_decisions, traffic_of
from recoup.solve.strategy import Choice
from recoup.units import format_seconds

__all__ = ["gap_of", "plan_of"]

_ROUNDING = 1e-9


def plan_of(
    graph: StepGraph,
    choice: Choice,
    simulation: Simulation,
    executor: Capabilities,
    unplanned: Simulation,
    *,
    strategy: str,
    budget_bytes: int,
    solve_seconds: float,
) -> Plan:
    """The plan that says just this choice: its recompute sites name the chosen storages and no others."""
    index = replays(graph)
    bound = unplanned.step_seconds if choice.drops_nothing else choice.bound_seconds
    plan = Plan(
        frontend=graph.frontend,
        fingerprint=graph.fingerprint,
        signature=graph.signature,
        environment=graph.environment,
        gear=executor.name,  # type: ignore[arg-type]
        strategy=strategy,
        budget_bytes=budget_bytes,
        peak_bytes=simulation.peak_bytes,
        step_seconds=simulation.step_seconds,
        unplanned_peak_bytes=unplanned.peak_bytes,
        unplanned_step_seconds=unplanned.step_seconds,
        bound_seconds=bound or 0.0,
        gap=gap_of(simulation.step_seconds, bound),
        price_seconds_per_byte=choice.price.seconds_per_byte if choice.price else None,
        binding=binding_in_words(graph, choice),
        solve_seconds=solve_seconds,
        root_calls=graph.root_calls,
        watch=_watched(index, choice.recompute),
        traffic=traffic_of(choice.offload, simulation),
        decisions=(
            *_decisions(index, choice.recompute, "recompute", choice.held_from),
            *offload_decisions(index, choice.offload, executor),
            *_decisions(index, _leaves(index, choice.recompute), "keep", ALWAYS),
        ),
    )
    assert plan_ids(graph, plan) == choice.recompute, "sites of activations are not unique"
    assert plan_offload(graph, plan) == choice.offload, "sites of activations are not unique"
    assert plan_holds(graph, plan) == choice.held_from, "a range of sites lost its companion"
    return plan


def gap_of(seconds: float, bound: float | None) -> float | None:
    """How far a time is above a proven bound, relative to it; None without a bound."""
    if bound is None or bound <= 0:
        return None
    gap = (seconds - bound) / bound
    return gap if gap > _ROUNDING else 0.0


def _leaves(index: Replays, recompute: frozenset[int]) -> frozenset[int]:
    """Activations that autograd does not save and that are held because a replay reads them."""
    return frozenset(
        u for v in recompute for u in index.inputs_of[v] if u not in recompute and index.is_activation[u] and not index.saves_of[u]
    )


def _decisions(index: Replays, chosen: frozenset[int], action: str, held_from: Mapping[int, int]) -> list[Decision]:
    storages = index.graph.storages
    ordered = [storages[v] for v in sorted(chosen, key=lambda v: _place(index, v))]
    by_site = {storage.site: storage for storage in ordered}
    triggers = {storages[v].site: storages[u].site for v, u in held_from.items()}
    decisions = []
    for pattern, trigger, sites in collapse_pairs((site, triggers.get(site, "")) for site in by_site):
        members = [by_site[site] for site in sites]
        decisions.append(
            Decision(
                site=pattern,
                action=cast(Action, action),
                bytes=sum(storage.bytes for storage in members),
                why=_rebuilt(index, members) if action == "recompute" else "replays read it",
                held_from=trigger,
            )
        )
    return decisions


def _place(index: Replays, v: int) -> tuple[int, int]:
    producer = index.graph.storages[v].producer
    return (-1 if producer is None else producer, v)


def _rebuilt(index: Replays, members: list[Storage]) -> str:
    seconds = sum(index.graph.ops[op].seconds for storage in members for op in index.ops_of[storage.id]) / len(members)
    names = dict.fromkeys(op_name(index.graph.ops[op].target) for op in index.ops_of[members[0].id])
    return f"rebuilt in {format_seconds(seconds)} by {', '.join(names)}"


def _watched(index: Replays, recompute: frozenset[int]) -> tuple[str, ...]:
    """Module calls in which other modules' dropped storages are written in place."""
    made = {index.frame_of[index.ops_of[v][0]] for v in recompute}
    written = {index.frame_of[op] for v in recompute for op in index.ops_of[v][1:]}
    return tuple(pattern for pattern, _ in collapse(f"{path}@{call}" if call else path for path, call in sorted(written - made)))
