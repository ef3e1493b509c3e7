"""Jobs and hypothesis strategies that several tests share."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from recoup.cost import device
from recoup.job.job import Job
from recoup.job.layer import layer_table
from recoup.job.layout import Kernels, Layout
from recoup.job.model import Model
from recoup.job.presets import preset
from recoup.job.pricing import Price, Prices
from recoup.job.shape import Shape
from recoup.job.table import Row, Table, Tensor

A100 = device("a100-80g")
GIB = 2**30


def small_job(**changes: object) -> Job:
    """A GPT of 22 billion parameters on 16 devices, explicit attention, dropout."""
    layout = {"tensor": 4, "sequence_parallel": True, "pipeline": 4, "micro_batch": 1, "global_batch": 16, "sequence": 2048} | changes
    return Job(preset("gpt-22b"), Layout(**layout), A100, Kernels(attention="explicit"))  # type: ignore[arg-type]


def gpt(layers: int = 4, hidden: int = 256, heads: int = 4, **changes: object) -> Model:
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab": 1024,
        "positions": 128,
        "attention_dropout": True,
        "hidden_dropout": True,
    }
    return Model(**(sizes | changes))  # type: ignore[arg-type]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Layers of all kinds of attention and feed-forward network, under all kinds of splits."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.sampled_from([0, 4]))
    model = gpt(
        hidden=draw(st.sampled_from([256, 512])), heads=8, kv_heads=draw(st.sampled_from([0, 4])), gated=draw(st.booleans()),
        rope=draw(st.booleans()), norm=draw(st.sampled_from(["layernorm", "rmsnorm"])), bias=draw(st.booleans()),
        attention_dropout=draw(st.booleans()), hidden_dropout=draw(st.booleans()), experts=experts, experts_per_token=2 if experts else 0,
        shared_ffn=draw(st.sampled_from([0, 256])) if experts else 0,
        latent_rank=draw(st.sampled_from([0, 64])), query_rank=64, rope_dim=32, head_dim=64,
    )  # fmt: skip
    model = model if model.latent_rank else gpt(**{name: getattr(model, name) for name in _PLAIN if name in model.__struct_fields__})
    kernels = Kernels(
        attention=draw(st.sampled_from(["flash", "explicit"])), fused_activation=draw(st.booleans()),
        fused_elementwise=draw(st.booleans()), fused_projections=draw(st.booleans()),
        expert_copies=draw(st.sampled_from([0, 2])),
    )  # fmt: skip
    return Shape(model, kernels, tensor, tensor > 1 and draw(st.booleans()), 1, 1, 1, draw(st.sampled_from([1, 2])), 128)


_PLAIN = (
    "layers", "hidden", "heads", "kv_heads", "gated", "rope", "norm", "bias", "attention_dropout", "hidden_dropout", "experts",
    "experts_per_token", "shared_ffn",
)  # fmt: skip


def kinds_of(shape: Shape) -> str:
    return "moe" if shape.model.experts else "dense"


def stacked(table: Table, prices: Prices, count: int, batches: int = 1) -> tuple[Table, Prices]:
    """So many equal layers in a row, as one table: what leaves one enters the next; several micro-batches go through one by one."""
    rows: list[Row] = []
    outside = tuple(Tensor(f"x{batch}", table.entering.bytes) for batch in range(1, batches))
    entering = table.entering.name
    for place in range(count * batches):
        if place and place % count == 0:
            entering = outside[place // count - 1].name
        names = {tensor.name: f"{tensor.name}_{place}" for row in table.rows for tensor in row.makes} | {table.entering.name: entering}
        for row in table.rows:
            rows.append(
                replace(
                    row, name=f"{row.name}_{place}", reads=tuple(names.get(name, name) for name in row.reads),
                    makes=tuple(Tensor(names[tensor.name], tensor.bytes) for tensor in row.makes),
                    saves=tuple(names.get(name, name) for name in row.saves), module=f"{place}.{row.module}",
                )
            )  # fmt: skip
        entering = names[table.rows[-1].makes[0].name]
    priced: tuple[Price, ...] = prices.rows * (count * batches)
    return Table(table.kind, table.entering, tuple(rows), outside), Prices(priced)


def table_of(shape: Shape) -> Table:
    return layer_table(shape, kinds_of(shape))
