"""Compiled models: a budget in bytes beside PyTorch's own ``activation_memory_budget``.

    python -m benchmarks.compiled --workloads gpt2 --kernels aten --points 4 --figure compiled.png

For each workload and kind of kernels, in one process: the step that keeps all, the stock partitioner at each ratio of ``--stock``,
then Recoup's backend at each stock point's measured peak and at ``--points`` budgets in equal steps from its least peak up. Each
is compiled with all caches off, its gradients are compared bit by bit with those of keeping all, its peak is measured, and then
all of them are timed round robin. ``--processor-time`` counts the processor's seconds instead of the clock's, for a machine that others use
as well; ``--keep-kernels`` compiles the C++ of equal kernels once for all variants, so that only the first pays for it (compile times
of Inductor then say little). ``--read FILE ...`` joins rows of earlier runs into one table and figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.compiled_report import Row, compiled_figure, curve_table, read_rows, summary_table
from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, processor_seconds, progress_bar, rounds, sizes, write
from benchmarks.workloads import load
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.solve import solve
from recoup.torch.compiled import budgeted, pricing, record
from recoup.torch.compiled.backend import compiled_plan
from recoup.torch.meter import measure_peak, resident_bytes
from recoup.torch.state import reachable

__all__ = ["main"]

KERNELS = ("aten", "inductor")
Step = Callable[[], Tensor]


@dataclass(slots=True)
class Watched:
    """What Recoup's backend did while something compiled: seconds of solving and of pricing, and the last graph it solved."""

    solve_seconds: float = 0.0
    pricing_seconds: float = 0.0
    graph: StepGraph | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A row in the making, the compiled call that it measures, and the seconds of its first two steps."""

    row: Row
    call: Any
    first_steps_seconds: float


@dataclass(slots=True)
class Bench:
    """One workload under one kind of kernels.

    Attributes:
        reference: gradients of the step that keeps all, by parameter, and its loss at ''; empty before it has run.
        graph: the step that keeps all, as Recoup sees it.
        clock: tells the seconds of steps and compilations.
        log: rows are appended there, one in a line, as soon as they are compiled; their times are those of one step.
        entries: what has been compiled so far.
    """

    name: str
    kernels: str
    model: nn.Module
    step: Step
    reference: dict[str, Tensor] = field(default_factory=dict)
    graph: StepGraph | None = None
    clock: Callable[[], float] = time.perf_counter
    log: Path | None = None
    entries: list[Entry] = field(default_factory=list)

    def add(self, variant: str, setting: str, backend: Any, options: dict[str, Any] | None = None) -> Row:
        """Compiles the model, runs two steps, compares gradients and measures the peak."""
        pricing._KNOWN.clear()  # prices found for one row must not shorten the compilation of the next
        self.model.compile(backend=backend, options=options) if options else self.model.compile(backend=backend)
        with watched(self.clock) as seen:
            start = self.clock()
            loss = self.step()
            found = {"": loss} | {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
            self.step()  # a step of several graphs gets its final plan here
            taken = self.clock() - start
        self.reference, self.graph = self.reference or found, self.graph or seen.graph
        row = Row(
            self.name,
            self.kernels,
            variant,
            setting,
            measured_peak_bytes=measure_peak(self.step, self.model),
            gradient_difference=max(_difference(found[name], expected) for name, expected in self.reference.items() if name),
            bitwise_equal=all(torch.equal(found[name], expected) for name, expected in self.reference.items()),
            loss_equal=torch.equal(loss, self.reference[""]),
            solve_seconds=seen.solve_seconds,
            pricing_seconds=seen.pricing_seconds,
        )
        plan = compiled_plan(options) if options else None
        if plan is not None:
            row = replace(row, budget_bytes=plan.budget_bytes, predicted_peak_bytes=plan.peak_bytes, gap=plan.gap)
        self.entries.append(Entry(row, self.model._compiled_call_impl, taken))
        if self.log is not None:
            self._append(row, taken, self.log)
        return row

    def _append(self, row: Row, first_steps_seconds: float, log: Path) -> None:
        """Writes a row down with the time of one step."""
        start = self.clock()
        self.step()
        seconds = self.clock() - start
        row = replace(row, step_seconds=seconds, compile_seconds=first_steps_seconds - 2 * seconds)
        with log.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def add_recoup(self, setting: str, budget_bytes: int, standing_bytes: int) -> None:
        """Recoup's backend at a budget of bytes."""
        name = f"{self.name} {self.kernels} {setting}"  # each row plans for itself, and finds no plan of another
        options = {"budget": budget_bytes, "kernels": self.kernels, "standing_bytes": standing_bytes, "results": "released", "step": name}
        self.add("recoup", setting, "recoup", options)

    def standing_bytes(self) -> int:
        """What stands before the step that the compiled graphs do not see; gradients, set to None in the step, are not there."""
        assert self.graph is not None
        self.model.zero_grad(set_to_none=True)
        seen = sum(storage.bytes for storage in self.graph.storages if storage.kind in ("parameter", "buffer", "input"))
        return max(resident_bytes(self.model, *reachable(self.step)) - seen, 0)

    @contextmanager
    def using(self, call: Any) -> Generator[None]:
        """The model calls this compiled variant of itself."""
        self.model._compiled_call_impl = call
        yield

    def rows(self, repeats: int, advance: Advance) -> list[Row]:
        """All rows with their times, taken round robin."""
        keys = [f"{entry.row.variant} {entry.row.setting}" for entry in self.entries]
        variants = {key: partial(self.using, entry.call) for key, entry in zip(keys, self.entries, strict=True)}
        timings = rounds(self.step, variants, repeats=repeats, advance=advance, clock=self.clock)
        base = timings[keys[0]].median_seconds
        return [
            replace(
                entry.row,
                step_seconds=timings[key].median_seconds,
                spread=timings[key].spread,
                relative_time=timings[key].median_seconds / base,
                compile_seconds=entry.first_steps_seconds - 2 * timings[key].median_seconds,
            )
            for key, entry in zip(keys, self.entries, strict=True)
        ]


@contextmanager
def watched(clock: Callable[[], float]) -> Generator[Watched]:
    """Times the solver and the pricing inside of Recoup's backend."""
    seen = Watched()

    def timed_solve(graph: StepGraph, *args: Any, **kwargs: Any) -> Any:
        seen.graph, start = graph, clock()
        try:
            return solve(graph, *args, **kwargs)
        finally:
            seen.solve_seconds += clock() - start

    def timed_priced(joint: Any) -> Any:
        start = clock()
        try:
            return pricing.priced(joint)
        finally:
            seen.pricing_seconds += clock() - start

    with patch.object(budgeted, "solve", timed_solve), patch.object(record, "priced", timed_priced):
        yield seen


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest element."""
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else found.abs().max().item()


def stock_backend(kernels: str, ratio: float) -> Callable[..., Any]:
    """PyTorch's own compilation with ``activation_memory_budget`` at a ratio."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with config.patch(activation_memory_budget=ratio):
            return aot_eager(gm, list(inputs)) if kernels == "aten" else compile_fx(gm, inputs)

    return backend


@contextmanager
def cold_compiler(keep_kernels: bool) -> Generator[None]:
    """No cache of PyTorch's answers for a compilation but, where asked for, of compiled C++; any number of variants stay alive."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=100_000))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.enter_context(inductor.patch(force_disable_caches=not keep_kernels, fx_graph_cache=False))
        yield
    torch.compiler.reset()


def loaded(name: str, options: argparse.Namespace) -> tuple[nn.Module, Step]:
    """The workload with the sizes asked for; its step draws the same random numbers every time."""
    asked = {"layers": options.blocks, "sequence": options.sequence, "width": options.width}
    model, once = load(name, tiny=options.tiny, **sizes(options), **{key: value for key, value in asked.items() if value is not None})
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, after a warning that breaks the graph

    def step() -> Tensor:
        torch.manual_seed(0)
        return once()

    return model, step


def measure(name: str, kernels: str, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """All rows of one workload under one kind of kernels; the first keeps all."""
    with cold_compiler(options.keep_kernels):
        clock = processor_seconds if options.processor_time else time.perf_counter
        bench = Bench(name, kernels, *loaded(name, options), clock=clock, log=options.log)
        advance(f"{name} {kernels}: keeping all")
        bench.add("keep all", "", "recoup", {"budget": "100%", "kernels": kernels, "step": f"{name} {kernels} all"})
        for ratio in options.stock:
            advance(f"{name} {kernels}: stock {ratio}")
            bench.add("stock", f"{ratio:g}", stock_backend(kernels, ratio))
        missing = add_recoup_rows(bench, options.points, advance)
        return bench.rows(options.repeats, advance) + missing


def add_recoup_rows(bench: Bench, points: int, advance: Advance) -> list[Row]:
    """Recoup at the stock points' measured peaks and at budgets from its least peak up; the rows of peaks it cannot reach."""
    assert bench.graph is not None
    standing = bench.standing_bytes()
    least, top = least_peak(bench, standing), bench.entries[0].row.measured_peak_bytes
    wanted = {f"at stock {entry.row.setting}": entry.row.measured_peak_bytes for entry in bench.entries if entry.row.variant == "stock"}
    wanted |= {f"budget {number}": least + number * (top - least) // points for number in range(points)}
    missing = []
    for setting, budget_bytes in wanted.items():
        assert budget_bytes is not None
        advance(f"{bench.name} {bench.kernels}: recoup {setting}")
        try:
            bench.add_recoup(setting, budget_bytes, standing)
        except BackendCompilerFailed as error:
            # Prices are measured anew for each row, and the search for the least peak goes by them.
            if not isinstance(error.inner_exception, InfeasibleBudget):
                raise
            note = f"does not fit: needs {mebibytes(error.inner_exception.least_bytes)} MiB"
            missing.append(Row(bench.name, bench.kernels, "recoup", setting, budget_bytes=budget_bytes, note=note))
    return missing


def least_peak(bench: Bench, standing_bytes: int) -> int:
    """The least peak that Recoup finds for the step, with what stands beside the graphs."""
    assert bench.graph is not None
    try:
        solve(bench.graph, 1)
    except InfeasibleBudget as error:
        return error.least_bytes + standing_bytes
    raise AssertionError("a step fits into one byte")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__ or "", repeats=3, workloads=("gpt2", "llama", "bert"))
    parser.add_argument("--kernels", default=",".join(KERNELS), help="kinds of kernels, separated by commas (default: %(default)s)")
    parser.add_argument("--stock", default="1,0.8,0.6,0.5,0.4,0.3,0.2,0.1,0", help="ratios of the stock budget (default: %(default)s)")
    parser.add_argument("--points", type=int, default=10, help="budgets of Recoup's own curve (default: %(default)s)")
    parser.add_argument("--blocks", type=int, help="blocks of each model, if not the workload's own number")
    parser.add_argument("--width", type=int, help="another width than each workload's own")
    parser.add_argument("--sequence", type=int, help="another sequence length than each workload's own")
    parser.add_argument("--processor-time", action="store_true", help="seconds of the processor instead of the clock")
    parser.add_argument("--keep-kernels", action="store_true", help="compile the C++ of equal kernels once for all variants")
    parser.add_argument("--log", type=Path, help="append each row there as soon as it is compiled, with the time of one step")
    parser.add_argument("--figure", type=Path, help="draw both curves there")
    parser.add_argument("--read", type=Path, nargs="+", default=(), help="rows of earlier runs (of --json) instead of measuring")
    options = parser.parse_args(argv)
    options.kernels = options.kernels.split(",")
    options.stock = [float(ratio) for ratio in options.stock.split(",") if ratio]
    if not set(options.kernels) <= set(KERNELS):
        raise UsageError(f"--kernels takes {' and '.join(KERNELS)}, separated by commas")
    if options.points < 0 or (not options.points and not options.stock):
        raise UsageError("--points must be 0 or more, and there must be points or --stock ratios")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and draws its figure."""
    options = options_of(argv)
    names = chosen_workloads(options)
    pairs = [(name, kernels) for name in names for kernels in options.kernels]
    rows = read_rows(options.read)
    if not options.read:
        variants = 1 + 2 * len(options.stock) + options.points
        with progress_bar(len(pairs) * variants * (1 + options.repeats)) as advance:
            rows = [row for name, kernels in pairs for row in measure(name, kernels, options, advance)]
    write(options, rows, [curve_table(rows), summary_table(rows)])
    if options.figure is not None:
        compiled_figure(rows, options.figure)


if __name__ == "__main__":
    main()
