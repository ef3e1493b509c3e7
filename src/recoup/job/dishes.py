"""Ways to run one layer: what one micro-batch leaves there, what its backward needs, the seconds that it adds.

A layer's step graph is solved by the shared program under a price on each kept byte: under m
micro-batches in flight a kept byte costs m bytes of memory, so that the answers to all prices are the answers for all
stages. What a way costs is read off the simulator. The named recipes are judged the same way, and are among the ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from recoup.job.graph import LayerGraph, layer_graph
from recoup.job.table import Table
from recoup.plan import Capabilities
from recoup.simulate.index import replays
from recoup.simulate.judge import run
from recoup.solve.program import Program
from recoup.solve.windows import windows

__all__ = ["JOB", "NAMED", "Dish", "dish", "dishes", "named_dish", "recomputed_by"]

JOB = Capabilities(name="live", keeps_unsaved=True, replays_random=True, rebuilds_again=False)
"""An executor without overheads: on a device that is kept busy they hide behind its kernels."""

NAMED = ("none", "selective", "full")
_CORNERS = 40
_SQUARE = ("scores", "probs", "dropped", "mask")


@dataclass(frozen=True, slots=True)
class Dish:
    """One way to run a layer.

    Attributes:
        name: of the recipe, or ``priced``.
        recompute: names of the tensors that are recomputed.
        offload: names of the tensors that wait in host memory.
        kept_bytes: left by one micro-batch until its backward, what enters the layer included.
        working_bytes: beside that at the worst moment of the backward (gradients, copies, scratch).
        forward_bytes: beside that at the worst moment of the forward.
        replay_seconds: of recomputation.
        replay_flops: of recomputation.
        offload_bytes: sent to the host and back.
        wait_seconds: of copies to and from the host that do not hide behind the layer's own compute.
        hidden_seconds: of ``replay_seconds`` those that run while a collective does.
    """

    name: str
    recompute: frozenset[str]
    offload: frozenset[str]
    kept_bytes: int
    working_bytes: int
    forward_bytes: int
    replay_seconds: float
    replay_flops: int
    offload_bytes: int = 0
    wait_seconds: float = 0.0
    hidden_seconds: float = 0.0

    @property
    def added_seconds(self) -> float:
        """What it adds to the layer's forward and backward."""
        return self.replay_seconds - self.hidden_seconds + self.wait_seconds


def recomputed_by(table: Table, recipe: str) -> frozenset[str]:
    """What a named recipe recomputes.

    ``none`` nothing; ``full`` and ``block`` all that the layer makes; ``selective`` the attention square (Korthikanti et al. 2022),
    of which
    fused attention has none; ``alternate`` all but attention and every other product (torchtitan's selective checkpointing).

    Raises:
        KeyError: no recipe has that name.
    """
    made = [tensor.name for row in table.rows for tensor in row.makes]
    if recipe == "selective":
        return frozenset(name for name in made if name.removeprefix("cross_") in _SQUARE)
    if recipe == "alternate":
        return frozenset(made) - _alternate(table)
    return {"none": frozenset[str](), "full": frozenset(made), "block": frozenset(made)}[recipe]


def _alternate(table: Table) -> frozenset[str]:
    """Attention, and the first, third, ... of the products (each column block of a fused one counts)."""
    kept, count = [], 0
    for row in table.rows:
        if any(work.kind == "attention" for work in row.forward):
            kept += [tensor.name for tensor in row.makes]
        elif any(work.kind == "matmul" and work.low for work in row.forward):
            for tensor in row.makes:
                count += 1
                if count % 2:
                    kept.append(tensor.name)
    return frozenset(kept)


def dish(layer: LayerGraph, recompute: Iterable[str], name: str = "priced", *, hide: bool = False) -> Dish:
    """A way that recomputes these tensors, simulated."""
    chosen = frozenset(recompute)
    found = run(layer.graph, frozenset(layer.storages[tensor] for tensor in chosen))
    ops = layer.graph.ops
    kept = int(found.bytes_at[layer.pause])
    seconds = sum(ops[op].seconds for op in found.replayed.ops)
    return Dish(
        name=name, recompute=chosen, offload=frozenset(), kept_bytes=kept,
        working_bytes=max(int(found.bytes_at[layer.pause :].max()) - kept, 0),
        forward_bytes=max(int(found.bytes_at[: layer.pause].max()) - kept, 0),
        replay_seconds=seconds, replay_flops=sum(ops[op].flops for op in found.replayed.ops),
        hidden_seconds=min(_window(layer, hide), seconds),
    )  # fmt: skip


def named_dish(layer: LayerGraph, recipe: str, *, hide: bool = False) -> Dish:
    """A named recipe as its executors run it.

    ``full`` re-runs the whole layer, the last product and its collective included, before the layer's backward begins, as
    Megatron-LM's full recomputation and reentrant ``torch.utils.checkpoint`` do; ``block`` stops at the last tensor that the
    backward reads, as ``torch.utils.checkpoint`` does otherwise.

    Raises:
        KeyError: no recipe has that name.
    """
    found = dish(layer, recomputed_by(layer.table, recipe), recipe, hide=hide)
    if recipe not in ("full", "block"):
        return found
    # All is rebuilt before anything is let go of.
    plain = dish(layer, (), "none")
    found = replace(
        found, working_bytes=plain.kept_bytes + plain.working_bytes - found.kept_bytes,
        forward_bytes=plain.kept_bytes + plain.forward_bytes - found.kept_bytes,
    )  # fmt: skip
    if recipe == "block":
        return found
    seconds = layer.prices.forward_seconds
    return replace(found, replay_seconds=seconds, replay_flops=layer.table.flops, hidden_seconds=min(_window(layer, hide), seconds))


def _window(layer: LayerGraph, hide: bool) -> float:
    """Seconds of collectives in the backward beyond what gradients of weights, which go first, fill."""
    return layer.prices.window_seconds if hide else 0.0


def dishes(layer: LayerGraph, *, hide: bool = False, host_bytes_per_second: float = 0.0) -> tuple[Dish, ...]:
    """The ways worth having: none that another one beats in bytes kept, bytes at work and seconds; the named ones among them.

    With a link to host memory some tensors of each way wait there, see :func:`_offloaded`.
    """
    found = [named_dish(layer, recipe, hide=hide) for recipe in NAMED]
    found += [dish(layer, names, hide=hide) for names in _choices(layer)]
    if host_bytes_per_second:
        found += _offloaded(layer, found, host_bytes_per_second, hide)
    best: list[Dish] = []
    for item in sorted(found, key=lambda item: (*_figures(item), item.name == "priced")):
        if not any(all(a <= b for a, b in zip(_figures(other), _figures(item), strict=True)) for other in best):
            best.append(item)
    return tuple(best)


def _offloaded(layer: LayerGraph, plain: list[Dish], rate: float, hide: bool) -> list[Dish]:
    """Ways in which tensors wait in host memory.

    Copies to the host run behind the layer's forward and copies back behind its backward; what is longer is charged. First
    those tensors go that cost most to recompute for each byte, as many as hide; the program then chooses among the others.
    And of each plain way all that it keeps goes.
    """
    hidden = min(layer.prices.forward_seconds, layer.prices.backward_seconds) * rate
    index = replays(layer.graph)
    sizes = {name: index.bytes[v] for name, v in layer.storages.items()}
    saved = [name for name in layer.table.saved if sizes.get(name)]
    worth = {name: sum(layer.graph.ops[op].seconds for op in index.ops_of[layer.storages[name]]) / sizes[name] for name in saved}
    free: list[str] = []
    for name in sorted(saved, key=lambda name: (-worth[name], name)):
        if sum(sizes[item] for item in free) + sizes[name] <= hidden:
            free.append(name)
    found: list[Dish] = []
    if free:
        lighter = layer_graph(_without(layer.table, frozenset(free)), layer.prices, layer.graph.name)
        for names in _choices(lighter):
            found.append(_sent(layer, dish(layer, names - frozenset(free), hide=hide), frozenset(free), rate))
    for way in plain:
        found.append(_sent(layer, way, frozenset(name for name in saved if name not in way.recompute), rate))
    return found


def _without(table: Table, names: frozenset[str]) -> Table:
    """The table with some tensors weightless."""
    rows = tuple(
        replace(row, makes=tuple(replace(item, bytes=0) if item.name in names else item for item in row.makes)) for row in table.rows
    )
    return replace(table, rows=rows)


def _sent(layer: LayerGraph, way: Dish, names: frozenset[str], rate: float) -> Dish:
    """A way of which some tensors go to the host and come back; two layers' at a time pass through the device."""
    tensors = layer.table.tensors
    size = sum(tensors[name].bytes for name in names)
    seconds = size / rate
    waits = max(seconds - layer.prices.forward_seconds, 0.0) + max(seconds - layer.prices.backward_seconds - way.replay_seconds, 0.0)
    return replace(
        way, name="priced", offload=names, kept_bytes=way.kept_bytes - size, working_bytes=way.working_bytes + 2 * size,
        forward_bytes=way.forward_bytes + 2 * size, offload_bytes=size, wait_seconds=waits,
    )  # fmt: skip


def _figures(item: Dish) -> tuple[float, int, int]:
    return item.added_seconds, item.kept_bytes, item.working_bytes


def _choices(layer: LayerGraph) -> list[frozenset[str]]:
    """The best at every price of a kept byte: the corners of the lower hull of (bytes kept, seconds), nothing and everything among them.

    Between two corners the price at which they cost the same is asked for; what comes back below the line between them is a
    corner too, and else there is none (Eisner and Severance 1976, doi:10.1145/321978.321982).
    """
    index = replays(layer.graph)
    frame = windows(index, JOB)
    names = {number: name for name, number in layer.storages.items()}
    ends = frozenset[str](), frozenset(names[v] for v in frame.dropping)
    program = Program(index, JOB, frame)
    corners = {recompute: dish(layer, recompute) for recompute in ends}
    between = [ends]
    while between and len(corners) < _CORNERS:
        left, right = between.pop(0)
        freed = corners[left].kept_bytes - corners[right].kept_bytes
        if freed <= 0:
            continue
        price = (corners[right].replay_seconds - corners[left].replay_seconds) / freed
        chosen = program.priced(price) if price > 0 else None
        recompute = left if chosen is None else frozenset(names[v] for v in chosen)
        if recompute in corners:
            continue
        found = dish(layer, recompute)
        corners[recompute] = found
        if found.replay_seconds + price * found.kept_bytes < corners[left].replay_seconds + price * corners[left].kept_bytes:
            between += [(left, recompute), (recompute, right)]
    return list(corners)
