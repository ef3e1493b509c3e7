"""Every plan of a small step that keeps, recomputes or offloads each storage: what the joint solver is checked against.

Copies are held from the first rebuild on; plans in which they wait are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from recoup.cost import OffloadLink
from recoup.graph import StepGraph
from recoup.plan import Capabilities
from recoup.simulate.index import replays
from recoup.simulate.judge import Run
from recoup.simulate.offload import Offload, offloadable
from recoup.solve.choice import droppable, runnable

__all__ = ["TooMany", "links", "plans"]

LIMIT = 6000


class TooMany(Exception):
    """The step has more plans than the limit."""


def plans(graph: StepGraph, executor: Capabilities, link: OffloadLink, windows: tuple[int, ...]) -> Iterator[tuple[int, float, int]]:
    """Peak in bytes, seconds and offloaded bytes of every plan over one link with windows of these sizes.

    Raises:
        TooMany: there are more than ``LIMIT``.
    """
    index = replays(graph)
    dropping, movable = droppable(index, executor), offloadable(index)
    decided = sorted(dropping | movable)
    choices = [("keep", *(["recompute"] if v in dropping else []), *(["offload"] if v in movable else [])) for v in decided]
    count = len(windows) ** 2
    for choice in choices:
        count *= len(choice)
    if count > LIMIT:
        raise TooMany(f"{count} plans")
    for actions in product(*choices):
        recompute = frozenset(v for v, action in zip(decided, actions, strict=True) if action == "recompute")
        away = frozenset(v for v, action in zip(decided, actions, strict=True) if action == "offload")
        if runnable(index, recompute, executor) != recompute:
            continue
        for write, read in product(windows, repeat=2) if away else [(0, 0)]:
            lived = Run(index, recompute, {}, Offload(away, link, write, read) if away else None)
            yield int(lived.bytes_at.max(initial=0)), lived.seconds(executor), sum(link.waiting_bytes(index.bytes[v]) for v in away)


def links(shared: st.SearchStrategy[bool] | None = None) -> st.SearchStrategy[OffloadLink]:
    """Links for steps of some hundred bytes and some ten seconds: from hopelessly slow to free."""
    rates = st.sampled_from([1.0, 10.0, 50.0, 1e3, 1e9])
    return st.builds(
        OffloadLink,
        target=st.sampled_from(["host", "disk"]),
        write_bytes_per_second=rates,
        read_bytes_per_second=rates,
        latency_seconds=st.sampled_from([0.0, 0.1, 1.0]),
        call_seconds=st.sampled_from([0.0, 0.05]),
        staging_bytes=st.sampled_from([0, 5, 40]),
        page_bytes=st.sampled_from([1, 8]),
        shared=shared or st.booleans(),
        drag=st.sampled_from([0.0, 0.1]),
    )
