"""What the executors themselves cost, where a step is bound by the CPU and every microsecond of Python shows.

    python -m benchmarks.overhead

Three questions: what a plan that drops nothing costs; what recomputing every block costs beside ``torch.utils.checkpoint``
on models of many tiny operations; and what one captured, replayed and packed thing costs in microseconds, which are the
numbers that ``recoup.plan.capabilities`` holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Advance, Timing, arguments, chosen_workloads, progress_bar, rounds, sizes, write
from benchmarks.peer_strategies import every_block, plain
from benchmarks.workloads import load
from recoup.graph import StepGraph
from recoup.plan import Plan
from recoup.simulate import plan_ids
from recoup.solve import solve
from recoup.torch import apply, record

__all__ = ["Row", "SmallOps", "TinyGpt", "main"]

GEARS = ("live", "static")


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        question: what is measured.
        model: what it is measured on.
        variant: under what.
        value: the number.
        unit: ``x plain``, ``x checkpoint`` or ``us``.
        detail: what it was divided by, and the like.
    """

    question: str
    model: str
    variant: str
    value: float
    unit: str
    detail: str = ""


class _Small(nn.Module):
    """``x = tanh(x * weight)``, several times, on a tensor of a few numbers."""

    def __init__(self, operations: int, width: int) -> None:
        super().__init__()
        self.operations = operations
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.operations):
            x = torch.tanh(x * self.weight)
        return x


class SmallOps(nn.Module):
    """Blocks of many tiny pointwise operations: all overhead, no work."""

    def __init__(self, layers: int = 8, operations: int = 12, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Small(operations, width) for _ in range(layers))
        self.register_buffer("sample", torch.linspace(-1, 1, 4 * width).view(4, width))

    def forward(self) -> Tensor:
        """The mean square of what the blocks make of a fixed sample."""
        x = self.sample
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TinyGpt(nn.Module):
    """A decoder of PyTorch's own layers, too small for its matrix products to matter; no dropout."""

    def __init__(self, layers: int = 8, width: int = 32, heads: int = 2, sequence: int = 16, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        options = {"dim_feedforward": 4 * width, "dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, **options) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("tokens", torch.arange(2 * sequence).view(2, sequence) * 7 % vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(sequence))

    def forward(self) -> Tensor:
        """The mean loss of predicting fixed tokens."""
        x = self.embedding(self.tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), self.tokens.flatten())


SMALL: dict[str, Callable[[], nn.Module]] = {"small operations": SmallOps, "tiny GPT": TinyGpt}


def small(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A small model and its step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SMALL[name]().train()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model()
        loss.backward()
        return loss.detach()

    return model, step


def drops_nothing(name: str, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """A plan that drops nothing, in both gears, over the plain step."""
    model, step = load(name, tiny=options.tiny, **sizes(options))
    advance(f"{name}: recording")
    graph = record(step, model=model, name=name)
    variants: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": partial(plain, model, step, [])}
    for gear in GEARS:
        variants[gear] = partial(apply, model, solve(graph, strategy="none", gear=gear), gear=gear)
    timings = rounds(step, variants, repeats=options.repeats, advance=advance)
    base = timings["plain"].median_seconds
    return [
        Row("a plan that drops nothing", name, gear, timings[gear].median_seconds / base, "x plain", f"spread {timings[gear].spread:.3f}")
        for gear in GEARS
    ]


def small_rows(name: str, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """Recomputing every block of a small model: whole steps beside checkpoint, then microseconds of each part."""
    model, step = small(name)
    advance(f"{name}: recording")
    graph = record(step, model=model, name=name)
    plans = {gear: every_block_plan(graph, gear) for gear in GEARS}
    variants: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": partial(plain, model, step, []),
        "checkpoint": partial(every_block, model, step, []),
        **{gear: partial(apply, model, plan, gear=gear) for gear, plan in plans.items()},
    }
    repeats = options.repeats * 5  # a step takes milliseconds, so more of them are cheap
    whole = rounds(step, variants, repeats=repeats, warm=3, advance=advance)
    forward = rounds(
        model, {key: enter for key, enter in variants.items() if key != "checkpoint"}, repeats=repeats, warm=3, advance=advance
    )
    rows = []
    for key in ("checkpoint", *GEARS):
        seconds, detail = whole[key].median_seconds, f"spread {whole[key].spread:.3f}"
        rows.append(Row("recompute every block", name, key, seconds / whole["plain"].median_seconds, "x plain", detail))
    for gear in GEARS:
        value = whole[gear].median_seconds / whole["checkpoint"].median_seconds
        rows.append(Row("recompute every block", name, gear, value, "x checkpoint", _dropped(graph, plans[gear])))
        rows += part_rows(name, graph, plans[gear], whole, forward)
    return rows


def every_block_plan(graph: StepGraph, gear: str) -> Plan:
    """The plan that drops what every block can spare, whatever the peak."""
    return solve(graph, strategy="every_block", gear=gear)


def _dropped(graph: StepGraph, plan: Plan) -> str:
    activations = sum(storage.kind == "activation" for storage in graph.storages)
    return f"drops {len(plan.recompute_sites)} of {activations} activations"


def part_rows(name: str, graph: StepGraph, plan: Plan, whole: dict[str, Timing], forward: dict[str, Timing]) -> list[Row]:
    """Microseconds of one captured (or packed) and one replayed thing, from the forward alone and from the rest of the step."""
    dropped = [graph.storages[number] for number in plan_ids(graph, plan)]
    replayed = {op for storage in dropped for op in (storage.producer, *storage.writes) if op is not None}
    if not replayed:
        return []
    frames = {(graph.ops[op].module, graph.ops[op].call) for op in replayed}
    captured = sum(op.phase == "forward" and (op.module, op.call) in frames for op in graph.ops)
    extra_forward = forward[plan.gear].median_seconds - forward["plain"].median_seconds
    extra_whole = whole[plan.gear].median_seconds - whole["plain"].median_seconds
    kernel_seconds = sum(graph.ops[op].seconds for op in replayed)
    replay_seconds = (extra_whole - extra_forward - kernel_seconds) / len(replayed)
    if plan.gear == "live":
        first = Row("capture in the forward", name, "live", 1e6 * extra_forward / captured, "us", f"per operation, of {captured} captured")
    else:
        saves = len(graph.saves)
        first = Row("packing in the forward", name, "static", 1e6 * extra_forward / saves, "us", f"per save, of {saves}")
    detail = f"per operation beyond its own time, of {len(replayed)} replayed"
    return [first, Row("replay in the backward", name, plan.gear, 1e6 * replay_seconds, "us", detail)]


def rows_table(rows: Iterable[Row]) -> Table:
    """All numbers."""
    table = Table(title="Overheads")
    for header in ("question", "model", "variant"):
        table.add_column(header)
    table.add_column("value", justify="right")
    for header in ("unit", "detail"):
        table.add_column(header)
    last = ""
    for row in rows:
        if last and row.question != last:
            table.add_section()
        table.add_row("" if row.question == last else row.question, row.model, row.variant, f"{row.value:.3f}", row.unit, row.detail)
        last = row.question
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = arguments(__doc__ or "", repeats=9, workloads=("gpt2", "resnet", "mixtral"))
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    total = len(names) * (1 + 3 * options.repeats) + len(SMALL) * (1 + 7 * 5 * options.repeats)
    with progress_bar(total) as advance:
        rows = [row for name in names for row in drops_nothing(name, options, advance)]
        rows += [row for name in SMALL for row in small_rows(name, options, advance)]
    rows.sort(key=lambda row: row.question)
    write(options, rows, [rows_table(rows)])


if __name__ == "__main__":
    main()
