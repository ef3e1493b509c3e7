"""Where memory binds, in words: the moments that give a budget its price, and the modules whose bytes stand there."""

from __future__ import annotations

from recoup.graph import StepGraph
from recoup.graph.site import collapse
from recoup.simulate.judge import Run, run
from recoup.solve.strategy import Choice
from recoup.units import format_bytes

__all__ = ["binding_in_words"]

_MOMENTS = 3


def binding_in_words(graph: StepGraph, choice: Choice) -> tuple[str, ...]:
    """One line for each of the moments that bind most: the operation, its share of the price, the modules that hold most there."""
    if choice.price is None or not choice.price.moments:
        return ()
    lived = run(graph, choice.recompute, choice.held_from, choice.offload)
    return tuple(_line(graph, lived, at, share) for at, share in choice.price.moments[:_MOMENTS])


def _line(graph: StepGraph, lived: Run, at: int, share: float) -> str:
    op = graph.ops[at]
    holding = _modules(graph, lived, at)
    return f"{op.site} of the {op.phase} ({share:.0%}){f', where {holding} stand' if holding else ''}"


def _modules(graph: StepGraph, lived: Run, at: int) -> str:
    """The layers whose activations and copies stand at an operation, those with most bytes first, crumbs left out."""
    recorded, copies = lived.live(lived.moment(at))
    totals: dict[str, int] = {}
    for v in (*recorded, *copies):
        storage = graph.storages[v]
        if storage.kind == "activation" and storage.producer is not None and graph.ops[storage.producer].phase == "forward":
            layer = _layer(graph.ops[storage.producer].module)
            totals[layer] = totals.get(layer, 0) + storage.bytes
    groups = [
        (pattern, sum(totals[site.removesuffix("/")] for site in sites)) for pattern, sites in collapse(f"{layer}/" for layer in totals)
    ]
    groups = sorted((group for group in groups if group[1] * 100 >= sum(totals.values())), key=lambda group: -group[1])
    return ", ".join(f"{pattern.removesuffix('/') or '(root)'} {format_bytes(count)}" for pattern, count in groups[:2])


def _layer(module: str) -> str:
    """A module path up to its first layer number, or its first part."""
    parts = module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
