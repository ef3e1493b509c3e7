"""A priced table as a step graph: one layer's forward, a pause in which other micro-batches run, its backward.

The pause is an operation that does nothing: what stands there is what one micro-batch leaves in the layer. The backward mirrors
the forward. A gradient is born with the backward of the last reader of what it belongs to, is added to by those of the
others, and goes when the backward of its maker is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recoup.graph import Op, Phase, Ref, Save, StepGraph, Storage, View
from recoup.job.pricing import Price, Prices
from recoup.job.table import Row, Table

__all__ = ["PAUSE", "LayerGraph", "layer_graph"]

PAUSE = "pause"


@dataclass(frozen=True, slots=True, eq=False)
class LayerGraph:
    """A layer's step graph.

    Attributes:
        graph: the step graph.
        storages: id of each tensor's storage, by name.
        pause: the operation between forward and backward.
        table: what it was made from.
        prices: its prices.
    """

    graph: StepGraph
    storages: dict[str, int]
    pause: int
    table: Table
    prices: Prices


@dataclass(slots=True)
class _Draft:
    name: str
    bytes: int
    kind: str
    site: str
    producer: int | None
    born: int
    writes: list[int] = field(default_factory=list)
    last_use: int = -1
    stays: bool = False


def layer_graph(table: Table, prices: Prices, path: str = "layer") -> LayerGraph:
    """The step graph of one layer for one micro-batch; sites begin with ``path``."""
    return _Builder(table, prices, path).build()


class _Builder:
    def __init__(self, table: Table, prices: Prices, path: str) -> None:
        self.table, self.prices, self.path = table, prices, path
        self.drafts: list[_Draft] = []
        self.ids: dict[str, int] = {}
        self.ops: list[Op] = []
        self.saves: list[Save] = []
        self.unpacked: list[int] = []
        self.gradients: dict[str, int] = {}

    def build(self) -> LayerGraph:
        for tensor in (self.table.entering, *self.table.outside):
            self._draft(tensor.name, tensor.bytes, "input", "", None, -1, stays=True)
        for row, price in zip(self.table.rows, self.prices.rows, strict=True):
            self._forward(row, price)
        unheld = [draft.last_use + 1 for draft in self.drafts]
        pause = len(self.ops)
        self._op(PAUSE, self.path, "forward", 0.0)
        begins = len(self.ops)
        self._incoming()
        for row, price in reversed(list(zip(self.table.rows, self.prices.rows, strict=True))):
            self._backward(row, price)
        return LayerGraph(self._finish(unheld, begins), dict(self.ids), pause, self.table, self.prices)

    def _draft(self, name: str, size: int, kind: str, site: str, producer: int | None, born: int, stays: bool = False) -> int:
        self.drafts.append(_Draft(name, size, kind, site, producer, born, last_use=max(born, 0), stays=stays))
        if kind != "gradient":
            self.ids[name] = len(self.drafts) - 1
        return len(self.drafts) - 1

    def _op(
        self, name: str, module: str, phase: Phase, seconds: float, *, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (), flags: tuple[str, ...] = (), flops: int = 0, scratch: int = 0,
    ) -> None:  # fmt: skip
        number = len(self.ops)
        # An operation reads what stood before it writes.
        reads = tuple(self._ref(v) for v in (*inputs, *mutates))
        for v in mutates:
            self.drafts[v].writes.append(number)
        for v in (*inputs, *outputs, *mutates):
            self.drafts[v].last_use = number
        self.ops.append(
            Op(
                id=number, site=f"{module}/{name}", target=f"job.{name}", inputs=reads,
                outputs=tuple(self._ref(v) for v in (*outputs, *mutates)),
                mutates=mutates, seconds=seconds, flops=flops, scratch_bytes=scratch, flags=flags, module=module, phase=phase,
                provenance="modelled",
            )
        )  # fmt: skip

    def _ref(self, v: int) -> Ref:
        return Ref(v, len(self.drafts[v].writes), View((self.drafts[v].bytes,), (1,), 0, "uint8"))

    def _module(self, row: Row) -> str:
        return f"{self.path}.{row.module}"

    def _forward(self, row: Row, price: Price) -> None:
        number, module = len(self.ops), self._module(row)
        inputs = tuple(self.ids[name] for name in row.reads if name in self.ids)
        outputs = tuple(self._draft(item.name, item.bytes, "activation", f"{module}/{item.name}", number, number) for item in row.makes)
        # Devices keep their generators' states in a few bytes, so random operations are not marked.
        flags = ("collective",) if row.sends else ()
        flops = sum(work.flops for work in row.forward)
        self._op(row.name, module, "forward", price.forward_seconds, inputs=inputs, outputs=outputs, flags=flags, flops=flops)

    def _incoming(self) -> None:
        """The gradient of what leaves the layer comes from the next one."""
        leaving = self.table.rows[-1].makes[0]
        made = self._gradient(leaving.name)
        self._op("incoming", self.path, "backward", 0.0, outputs=(made,))

    def _gradient(self, name: str) -> int:
        size = self.drafts[self.ids[name]].bytes
        self.gradients[name] = self._draft(name, size, "gradient", "", len(self.ops), len(self.ops))
        return self.gradients[name]

    def _backward(self, row: Row, price: Price) -> None:
        number = len(self.ops)
        saved = tuple(self.ids[name] for name in row.saves if name in self.ids)
        arriving = tuple(self.gradients[item.name] for item in row.makes if item.name in self.gradients)
        differentiable = [name for name in row.reads if name in self.ids]
        added = tuple(self.gradients[name] for name in differentiable if name in self.gradients)
        fresh = tuple(self._gradient(name) for name in differentiable if name not in self.gradients)
        scratch = row.scratch + sum(self.drafts[v].bytes for v in added)
        for v in saved:
            self.unpacked.append(len(self.saves))
            packed = self.drafts[v].producer
            self.saves.append(Save(ref=self._ref(v), packed_at=(packed or 0) + 1, unpacked_at=(number,), released_at=number + 1))
        flops = sum(work.flops for work in (*row.data, *row.weight))
        flags = ("collective",) if row.returns else ()
        self._op(
            f"{row.name}_backward", self._module(row), "backward", price.backward_seconds, inputs=(*saved, *arriving), outputs=fresh,
            mutates=added, flags=flags, flops=flops, scratch=scratch,
        )  # fmt: skip

    def _finish(self, unheld: list[int], begins: int) -> StepGraph:
        count = len(self.ops)
        entering = self.gradients.get(self.table.entering.name)
        released: dict[int, int] = {}
        for save in self.saves:
            released[save.ref.storage] = max(released.get(save.ref.storage, 0), save.released_at)
        storages = []
        for number, draft in enumerate(self.drafts):
            free = unheld[number] if number < len(unheld) else draft.last_use + 1
            if draft.stays or number == entering:
                free = count
            storages.append(
                Storage(
                    id=number, bytes=draft.bytes, kind=draft.kind, site=draft.site, producer=draft.producer,  # type: ignore[arg-type]
                    writes=tuple(draft.writes), born=draft.born, dies=max(free, released.get(number, 0)), unheld_dies=free,
                    replayable="" if draft.kind == "activation" else "not an activation of the forward",
                )
            )  # fmt: skip
        return StepGraph(
            ops=tuple(self.ops), storages=tuple(storages), saves=tuple(self.saves), unpack_order=tuple(self.unpacked),
            backwards=(begins,), name=self.path, frontend="job", device="modelled",
        )  # fmt: skip
