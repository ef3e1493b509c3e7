"""A plan on the step graph it was made for: what it drops, holds and offloads, and its simulation."""

from __future__ import annotations

from recoup.errors import PlanMismatch
from recoup.graph import StepGraph
from recoup.graph.tiled import tiled
from recoup.plan import Plan
from recoup.plan.capabilities import capabilities
from recoup.simulate.judge import simulate
from recoup.simulate.offload import Offload
from recoup.simulate.result import Simulation

__all__ = ["plan_holds", "plan_ids", "plan_offload", "simulate_plan"]


def simulate_plan(graph: StepGraph, plan: Plan) -> Simulation:
    """A plan on the graph it was made for, with the executor of its gear.

    Raises:
        PlanMismatch: the plan names a site that the graph does not have, or what its executor cannot run.
    """
    graph = tiled(graph, plan.tiles_by_module)
    return simulate(graph, plan_ids(graph, plan), capabilities(plan.gear), plan_holds(graph, plan), plan_offload(graph, plan))


def plan_ids(graph: StepGraph, plan: Plan) -> frozenset[int]:
    """The ids of the storages that a plan drops.

    Raises:
        PlanMismatch: the plan names a site that the graph does not have.
    """
    by_site = _by_site(graph)
    missing = sorted(site for site in plan.recompute_sites if site not in by_site)
    if missing:
        raise PlanMismatch(
            f"the plan recomputes {missing[0]}, which the step {graph.name!r} does not have"
            f" ({len(missing)} of {len(plan.recompute_sites)} sites are missing); record the step and solve again"
        )
    return frozenset(by_site[site] for site in plan.recompute_sites)


def plan_offload(graph: StepGraph, plan: Plan) -> Offload | None:
    """What a plan offloads; None where it offloads nothing, or leaves the moving to its front-end (JAX).

    Raises:
        PlanMismatch: the plan names a site that the graph does not have.
    """
    traffic = plan.traffic
    if traffic is None or not plan.offload_sites:
        return None
    by_site = _by_site(graph)
    missing = sorted(site for site in plan.offload_sites if site not in by_site)
    if missing:
        raise PlanMismatch(f"the plan offloads {missing[0]}, which the step {graph.name!r} does not have; record the step and solve again")
    storages = frozenset(by_site[site] for site in plan.offload_sites)
    return Offload(storages, traffic.link, traffic.write_window_bytes, traffic.read_window_bytes, traffic.limit_bytes)


def plan_holds(graph: StepGraph, plan: Plan) -> dict[int, int]:
    """For each dropped storage that waits, the one that the backward must have asked for before copies of it are held.

    Raises:
        PlanMismatch: the plan names a site that the graph does not have.
    """
    by_site = _by_site(graph)
    found: dict[int, int] = {}
    for site, trigger in plan.held_from_sites.items():
        if site not in by_site or trigger not in by_site:
            raise PlanMismatch(f"the plan holds {site} from {trigger}, which the step {graph.name!r} does not have")
        found[by_site[site]] = by_site[trigger]
    return found


def _by_site(graph: StepGraph) -> dict[str, int]:
    return {storage.site: storage.id for storage in graph.storages if storage.kind == "activation" and storage.site}
