"""Offloads in a plan: decisions by site, and how the bytes move."""

from __future__ import annotations

from recoup.graph import Storage
from recoup.graph.site import collapse
from recoup.plan import Capabilities, Decision, Traffic
from recoup.simulate import Simulation
from recoup.simulate.index import Replays
from recoup.simulate.offload import Offload
from recoup.solve.choice import droppable
from recoup.units import format_seconds

__all__ = ["offload_decisions", "traffic_of"]


def traffic_of(offload: Offload | None, simulation: Simulation) -> Traffic | None:
    """How offloaded storages move in a plan; None where nothing does."""
    if offload is None or simulation.transfers is None:
        return None
    return Traffic(
        link=offload.link,
        write_window_bytes=offload.write_window_bytes,
        read_window_bytes=offload.read_window_bytes,
        offloaded_bytes=simulation.offloaded_bytes,
        limit_bytes=offload.limit_bytes,
        stall_seconds=simulation.transfers.stall_seconds,
    )


def offload_decisions(index: Replays, offload: Offload | None, executor: Capabilities) -> list[Decision]:
    """The offloads of a plan, in the order of the step, identical layers together."""
    if offload is None:
        return []
    storages = index.graph.storages
    by_site = {storages[v].site: storages[v] for v in sorted(offload.storages, key=lambda v: (storages[v].born, v))}
    decisions = []
    for pattern, sites in collapse(by_site):
        members = [by_site[site] for site in sites]
        decisions.append(
            Decision(
                site=pattern,
                action="offload",
                bytes=sum(storage.bytes for storage in members),
                why=_moved(index, offload, members, executor),
                target=offload.link.target,
            )
        )
    return decisions


def _moved(index: Replays, offload: Offload, members: list[Storage], executor: Capabilities) -> str:
    """Seconds on the link, out and back, beside those of rebuilding, for one of the members on average."""
    link, count = offload.link, len(members)
    moved = sum(link.write_seconds(storage.bytes) + link.read_seconds(storage.bytes) for storage in members) / count
    if any(storage.replayable for storage in members):
        reason = next(storage.replayable for storage in members if storage.replayable)
        return f"moved in {format_seconds(moved)}, cannot be rebuilt: {reason}"
    if not all(storage.id in droppable(index, executor) for storage in members):
        return f"moved in {format_seconds(moved)}, cannot be rebuilt in the {executor.name} gear"
    rebuilt = sum(index.graph.ops[op].seconds + executor.replay_seconds for storage in members for op in index.ops_of[storage.id]) / count
    return f"moved in {format_seconds(moved)}, rebuilt in {format_seconds(rebuilt)}"
