"""``longest``: a step at any size from a few recordings, and the largest size that fits, run for real."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphs
import recoup
from benchmarks.workloads import load
from recoup.cli import main
from recoup.errors import InfeasibleBudget, UsageError, VerifyFailure
from recoup.fitting import with_scratch
from recoup.graph import Op, StepGraph
from recoup.graph.peak import peak_bytes
from recoup.graph.rules import check
from recoup.graph.scale import Growth, ScaledStep
from recoup.longest import Longest, longest, workshop
from recoup.longest.search import Search, largest
from recoup.longest.workshop import Workshop
from recoup.plan.file import load_plan
from recoup.simulate import simulate
from recoup.solve import solve
from recoup.torch import record

BUDGET = 2 * 2**20
PATIENCE = 300.0  # seconds for a search


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Each run collects garbage, which need not go through all that is imported each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def transformers(*tokens: int, blocks: int = 3) -> dict[int, StepGraph]:
    """Synthetic steps; at multiples of 125 tokens all their bytes are polynomials."""
    return {count: graphs.transformer(blocks, tokens=count) for count in tokens}


# -- the model of a step over its size


@pytest.mark.parametrize("recorded", [(125, 250, 375), (250, 1000, 500), (125, 250, 500, 1000)])
@pytest.mark.parametrize("size", [125, 625, 4000, 125_000])
def test_the_scaled_step_is_the_true_one(recorded: tuple[int, ...], size: int) -> None:
    scaled = ScaledStep.through(transformers(*recorded), "tokens")
    found, true = scaled.at(size), graphs.transformer(3, tokens=size)
    check(found)
    assert found.storages == true.storages
    assert found.saves == true.saves
    assert found.fingerprint == true.fingerprint
    assert [op.scratch_bytes for op in found.ops] == [op.scratch_bytes for op in true.ops]
    assert [op.seconds for op in found.ops] == pytest.approx([op.seconds for op in true.ops])
    dropped = frozenset(storage.id for storage in true.storages if storage.site.endswith(("/gelu", "/mul", "/add")))
    for recompute in (frozenset(), dropped):
        one, other = simulate(found, recompute), simulate(true, recompute)
        assert (one.peak_bytes, one.peak_op) == (other.peak_bytes, other.peak_op)
        assert one.step_seconds == pytest.approx(other.step_seconds)
    assert scaled.error(size, true) == 0
    assert list(scaled.errors.values()) == [0] * (len(recorded) - 3)


def test_a_plan_of_the_scaled_step_is_one_of_the_true_step() -> None:
    found, true = ScaledStep.through(transformers(125, 250, 500)).at(2000), graphs.transformer(3, tokens=2000)
    plan = solve(found, "60%")
    assert recoup.simulate(true, plan).peak_bytes == plan.peak_bytes
    assert plan.fingerprint == true.fingerprint


def test_a_fourth_recording_says_how_far_the_model_is_off() -> None:
    recordings = transformers(125, 250, 500, 1000)
    larger = tuple(msgspec.structs.replace(op, scratch_bytes=op.scratch_bytes + 10**6) for op in recordings[250].ops)
    recordings[250] = msgspec.structs.replace(recordings[250], ops=larger)
    (error,) = ScaledStep.through(recordings).errors.values()
    assert error == pytest.approx(-(10**6) / peak_bytes(recordings[250]))


@given(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 1000)),
    st.lists(st.integers(1, 5000), min_size=3, max_size=3, unique=True).map(sorted),
    st.integers(1, 100_000),
)
def test_polynomials_are_exact(coefficients: tuple[int, int, int], sizes: list[int], size: int) -> None:
    def true(n: int) -> int:
        return coefficients[0] + coefficients[1] * n + coefficients[2] * n * n

    growth = Growth.through(sizes, [true(n) for n in sizes])
    assert growth.at(size) == true(size)
    assert growth.degree == (2 if coefficients[2] else 1 if coefficients[1] else 0)


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=3), st.integers(1, 10**5))
def test_amounts_are_never_negative(values: list[int], size: int) -> None:
    growth = Growth.through((10, 25, 70), values)
    assert growth.at(size) >= 0
    assert growth.at(10) == values[0]
    assert growth.at(70) == values[2]
    assert growth.at(25) <= values[1]


@given(st.lists(st.integers(1, 5000), min_size=3, max_size=3, unique=True).map(sorted), st.integers(1, 50_000))
def test_granularity_is_rounded_up(sizes: list[int], beyond: int) -> None:
    """Sizes in whole blocks of 512, as an allocator may give them; a multiple of the block's own size is exact."""
    growth = Growth.through([512 * n for n in sizes], [512 * n for n in sizes])
    assert growth.at(512 * beyond) == 512 * beyond
    assert growth.at(512 * beyond + 1) >= 512 * beyond


def timed(size: int, seconds: Callable[[int, float], float]) -> StepGraph:
    graph = graphs.transformer(1, tokens=size)
    ops = tuple(msgspec.structs.replace(op, seconds=seconds(op.id, size)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops, step_seconds=2 * sum(op.seconds for op in ops))


def touches_tokens(op: Op, scaled: ScaledStep) -> bool:
    sizes = [{ref.storage: graph.storages[ref.storage].bytes for ref in (*op.inputs, *op.outputs)} for graph in scaled.recordings.values()]
    return sizes[0] != sizes[1]


def test_seconds_grow_no_faster_than_what_is_touched() -> None:
    # Operations of the synthetic step touch bytes in proportion to its tokens, or none that grow.
    square = ScaledStep.through({n: timed(n, lambda op, n: 1e-9 * n * n) for n in (125, 250, 500)})
    line = ScaledStep.through({n: timed(n, lambda op, n: 1e-6 * op + 1e-7 * n) for n in (125, 250, 500)})
    falling = ScaledStep.through({n: timed(n, lambda op, n: 1.0 / n) for n in (125, 250, 500)})
    assert all(op.seconds < 0.2 * 1e-9 * 8000**2 for op in square.at(8000).ops)
    assert all(op.seconds == pytest.approx(1e-6 * op.id + 8e-4) for op in line.at(8000).ops if touches_tokens(op, line))
    assert all(0 < op.seconds <= 1 / 125 for op in falling.at(8000).ops)
    found = line.at(8000)
    assert found.step_seconds == pytest.approx(2 * sum(op.seconds for op in found.ops))
    assert {op.provenance for op in found.ops} == {"modelled"}


def changed(graph: StepGraph, name: str, place: int, **fields: Any) -> StepGraph:
    items = list(getattr(graph, name))
    items[place] = msgspec.structs.replace(items[place], **fields)
    return msgspec.structs.replace(graph, **{name: tuple(items)})


@pytest.mark.parametrize(
    ("name", "place", "fields", "says"),
    [
        ("ops", 5, {"target": "aten.other.default"}, "operation 5, h.0.attn/clone: target"),
        ("ops", 5, {"inputs": ()}, r"operation 5, h.0.attn/clone: inputs .* there, \[\] here"),
        ("ops", 7, {"flags": ("opaque",)}, "operation 7, .*: flags"),
        ("storages", 6, {"dies": 11}, "storage 6 .*: dies"),
        ("storages", 6, {"replayable": "no"}, "storage 6 .*: replayable '' there, 'no' here"),
        ("saves", 2, {"released_at": 3}, "saved tensor 2: released_at"),
    ],
)
def test_the_first_difference_of_structure_is_named(name: str, place: int, fields: dict[str, Any], says: str) -> None:
    recordings = transformers(125, 250, 500)
    recordings[250] = changed(recordings[250], name, place, **fields)
    with pytest.raises(UsageError, match=rf"at tokens=250 is not that at tokens=125: {says}"):
        ScaledStep.through(recordings, "tokens")


def test_steps_of_other_length_or_too_few_are_refused() -> None:
    with pytest.raises(UsageError, match="three or more"):
        ScaledStep.through(transformers(125, 250))
    with pytest.raises(UsageError, match=r"operation 53, h\.2.ln_1/native_layer_norm: site"):
        ScaledStep.through({**transformers(125, 250), 500: graphs.transformer(2, tokens=500)})
    shorter = transformers(125, 250, 500)
    shorter[500] = msgspec.structs.replace(shorter[500], ops=shorter[500].ops[:-1])
    with pytest.raises(UsageError, match=r"(\d+) ops there, \d+ here"):
        ScaledStep.through(shorter)
    dtypes = {n: msgspec.structs.replace(graph, signature=f"4x{n}:int64") for n, graph in transformers(125, 250, 500).items()}
    assert ScaledStep.through(dtypes).at(3000).signature == "4x3000:int64"
    dtypes[500] = msgspec.structs.replace(dtypes[500], signature="4x500:float64")
    with pytest.raises(UsageError, match="signature '4x125:int64' there, '4x500:float64' here"):
        ScaledStep.through(dtypes)


# -- the search


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 50), st.integers(1, 300), st.integers(1, 40), st.integers(0, 10**7))
def test_the_largest_size_is_found(constant: int, line: int, square: int, start: int, step: int, budget: int) -> None:
    grid = range(step, 400 * step + 1, step)

    def peak(n: int) -> int:
        return constant + line * n + square * n * n

    found = largest(grid, peak, budget, start)
    assert found == max((n for n in grid if peak(n) <= budget), default=None)


def test_few_questions_are_asked() -> None:
    asked: list[int] = []

    def peak(n: int) -> int:
        asked.append(n)
        return 10**8 + 10**5 * n + 40 * n * n

    assert largest(range(1, 1 << 24), peak, 64 * 2**30, 64) is not None
    assert len(asked) <= 12
    assert largest(range(8, 8), peak, 1, 8) is None


class Stub:
    """A workshop whose real steps need ``extra`` bytes more than synthetic ones do, and do not verify at some sizes."""

    def __init__(self, extra: Callable[[int], int] = lambda tokens: 0, unverified: tuple[int, ...] = ()) -> None:
        self.extra, self.unverified, self.tries = extra, unverified, []
        self.over, self.strategy = "tokens", SimpleNamespace(name="none")

    def recorded(self, size: int) -> StepGraph:
        return with_scratch(graphs.transformer(3, tokens=size), self.extra(size))

    def solve(self, graph: StepGraph, budget_bytes: int, size: int) -> Any:
        return solve(graph, budget_bytes, strategy="none")

    def tried(self, scaled: ScaledStep, size: int, budget_bytes: int, excess_bytes: int) -> Any:
        self.tries.append(size)
        modelled, real = peak_bytes(scaled.at(size)), peak_bytes(self.recorded(size))
        if size in self.unverified:
            raise VerifyFailure("differs")
        if real > budget_bytes:
            raise InfeasibleBudget("no", budget_bytes=budget_bytes, least_bytes=real, moment="m")
        return SimpleNamespace(size=size, compared_at=size, model_error=(modelled - real) / real)


def searched(stub: Stub, grid: range = range(125, 10**6, 125)) -> tuple[Any, Search]:
    scaled = ScaledStep.through({size: stub.recorded(size) for size in (125, 250, 500)}, "tokens")
    search = Search(stub, scaled, 10**9, grid)  # type: ignore[arg-type]
    return search.planned(125), search


def steps(tokens: int) -> int:
    """Bytes that are there from 1000 tokens on, and that no small recording sees."""
    return 7 * 10**7 if tokens >= 1000 else 0


def slowing(tokens: int) -> int:
    """Bytes that grow ever less, so that a line through small recordings is too careful."""
    return 10**7 * math.isqrt(tokens)


@pytest.mark.parametrize(("extra", "tries"), [(lambda tokens: 0, 1), (lambda tokens: 5 * tokens, 1), (steps, 2), (slowing, 4)])
def test_what_is_seen_corrects_the_model(extra: Callable[[int], int], tries: int) -> None:
    stub = Stub(extra)
    found, search = searched(stub)
    true = [n for n in range(125, 20_000, 125) if peak_bytes(stub.recorded(n)) <= 10**9]
    assert found.size == max(true)
    assert search.least_bytes(found.size + 125) > 10**9
    assert len(stub.tries) <= tries


def test_a_size_that_does_not_verify_is_left_out() -> None:
    plain, _ = searched(Stub())
    stub = Stub(unverified=(plain.size,))
    assert searched(stub)[0].size == plain.size - 125
    assert stub.tries == [plain.size, plain.size - 125]
    with pytest.raises(VerifyFailure, match="differs"):
        searched(Stub(unverified=tuple(range(125, plain.size + 1, 125))))


def test_nothing_fits_for_real() -> None:
    with pytest.raises(InfeasibleBudget, match=r"even at tokens=625: the least peak found there is") as caught:
        searched(Stub(lambda tokens: 0 if tokens <= 500 else 10**9), range(625, 10**6, 125))
    assert caught.value.least_bytes == peak_bytes(graphs.transformer(3, tokens=625)) + 10**9


# -- real steps


def gpt2(**sizes: int) -> tuple[nn.Module, Callable[[], object]]:
    return load("gpt2", tiny=True, **sizes)


def single(**sizes: int) -> tuple[nn.Module, Callable[[], object]]:
    return gpt2(layers=1, **sizes)


def recorded(model: nn.Module, step: Callable[[], object]) -> StepGraph:
    return record(step, model=model, runs=1)


def demand(found: Longest, budget_bytes: int) -> None:
    assert found.verification.passed
    assert found.budget_bytes == found.plan.budget_bytes == budget_bytes
    assert 0.9 * budget_bytes < found.measured_peak_bytes <= budget_bytes
    assert found.measured_peak_bytes <= found.predicted_peak_bytes <= budget_bytes
    assert abs(found.model_error) < 1e-2
    assert found.next_least_bytes is not None
    assert found.next_least_bytes > budget_bytes
    assert found.size > 1.2 * found.unplanned_size > 0
    assert found.seconds_per_token == found.step_seconds / found.tokens > 0
    assert found.unplanned_seconds_per_token is not None


def test_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the usual limit would end a search early, and another size would be the answer.
    monkeypatch.setattr(workshop, "solve", partial(solve, time_limit_seconds=PATIENCE))
    said: list[str] = []
    found = recoup.longest(single, BUDGET, over="sequence", multiple=8, gear="live", progress=lambda done, total, text: said.append(text))
    demand(found, BUDGET)
    assert found.compared_at == found.size
    assert found.size % 8 == found.unplanned_size % 8 == 0
    assert found.tokens == found.size
    assert max(found.recorded_sizes) < found.unplanned_size
    assert {"gradients", "peak"} <= {check.name for check in found.verification.checks}
    assert {f"sequence={found.size}: solving", "sequence=8: measuring the peak"} <= set(said)
    # The next size but one is refused for real, and the next one without a plan does not fit.
    with pytest.raises(InfeasibleBudget):
        solve(recorded(*single(sequence=found.size + 16)), BUDGET, gear="live", time_limit_seconds=PATIENCE)
    model, step = single(sequence=found.unplanned_size + 8)
    assert recoup.torch.measure_peak(step, model) > BUDGET


def test_the_largest_batch_alone() -> None:
    found = longest(gpt2, BUDGET, over="batch", tokens=16, strategy="selective", check="alone", sizes=(2, 4, 6, 8))
    demand(found, BUDGET)
    assert found.compared_at == 8
    assert found.recorded_sizes == (2, 4, 6, 8)
    assert found.tokens == 16 * found.size
    assert "gradients at batch=8" in {check.name for check in found.verification.checks}
    assert recorded(*gpt2(batch=found.size)).fingerprint == found.graph.fingerprint == found.plan.fingerprint
    with pytest.raises(InfeasibleBudget):
        solve(recorded(*gpt2(batch=found.size + 1)), BUDGET, strategy="selective")


def net(*, batch: int, width: int = 32) -> tuple[nn.Module, Callable[[], object]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(3)))
    x = torch.randn(batch, width)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return model, step


def test_a_bound_ends_the_search() -> None:
    found = longest(net, "1GiB", over="batch", most=100, strategy="every_block", tokens=lambda batch: 32 * batch, sizes=(2, 3, 4))
    assert (found.size, found.unplanned_size, found.tokens) == (100, 100, 3200)
    assert found.next_size is found.next_least_bytes is None
    assert found.plan.strategy == "every_block"


def test_even_the_least_does_not_fit() -> None:
    with pytest.raises(InfeasibleBudget, match="even at batch=512") as caught:
        longest(net, 100_000, over="batch", least=512, sizes=(2, 4, 8), strategy="every_block")
    error = caught.value
    assert error.budget_bytes == 100_000
    assert error.moment
    found = longest(net, error.least_bytes, over="batch", least=512, most=513, sizes=(2, 4, 8), strategy="every_block")
    assert (found.size, found.unplanned_size, found.unplanned_seconds_per_token) == (512, 0, None)


def test_a_device_that_gives_less_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"over": "batch", "multiple": 32, "sizes": (32, 64, 96), "check": "alone", "strategy": "every_block"}
    plain = longest(net, 2**19, **options)
    measured = Workshop.measured

    def short(self: Workshop, size: int, plan: Any = None) -> tuple[int, float]:
        if size >= plain.size:
            raise torch.OutOfMemoryError("no room")
        return measured(self, size, plan)

    monkeypatch.setattr(Workshop, "measured", short)
    found = longest(net, 2**19, **options)
    assert 0.9 * plain.size <= found.size < plain.size

    def larger(self: Workshop, size: int, plan: Any = None) -> tuple[int, float]:
        peak, seconds = measured(self, size, plan)
        return peak + (25_000 if plan is not None else 0), seconds

    monkeypatch.setattr(Workshop, "measured", larger)
    found = longest(net, 2**19, **options)
    assert found.size < plain.size
    assert found.measured_peak_bytes <= 2**19
    assert found.model_error == pytest.approx(-25_000 / found.measured_peak_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "60%"}, "give bytes"),
        ({"budget": "much"}, "6GiB"),
        ({"check": "never"}, "'auto', 'compared' or 'alone'"),
        ({"gear": "third"}, "no gear"),
        ({"strategy": "best"}, "no strategy"),
        ({"multiple": 0}, "at least 1"),
        ({"least": 65, "most": 127, "multiple": 64}, "no multiple of 64"),
        ({"sizes": (2, 4, 4)}, "three or more different sizes"),
        ({"most": 5}, "no three sizes"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], says: str) -> None:
    def never(**sizes: int) -> Any:
        raise AssertionError

    with pytest.raises(UsageError, match=says):
        longest(never, **{"budget": "1MiB", "over": "batch", **options})


def test_a_step_that_does_not_grow_needs_a_bound() -> None:
    with pytest.raises(UsageError, match="fits at any size; give the most"):
        longest(lambda size: net(batch=8), "1GiB", over="size", sizes=(2, 4, 8))
    with pytest.raises(UsageError, match="at layers=3 is not that at layers=2"):
        longest(lambda layers: load("chain", tiny=True, layers=layers), "1GiB", over="layers", sizes=(2, 3, 4))


# -- the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def workload(*, batch, width=32):\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(3)))\n"
        "    x = torch.randn(batch, width)\n"
        "    return model, lambda: (model.zero_grad(), model(x).square().sum().backward())[1]\n"
    )
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["longest", "train.py:workload", *argv])
    return status, *capsys.readouterr()


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--over", "batch", "--budget", "1MiB", "--multiple", "64", "--set", "width=16", "--tokens", "2", "-o", "p.plan.json")
    status, out, err = run(capsys, *argv, "--format", "json")
    assert status == 0, err
    facts = json.loads(out)
    assert facts["over"] == "batch"
    assert facts["size"] % 64 == 0
    assert facts["size"] > facts["unplanned_size"]
    assert facts["measured_peak_bytes"] <= facts["budget_bytes"] == 2**20 < facts["next_least_bytes"]
    assert facts["seconds_per_token"] == facts["step_seconds"] / (2 * facts["size"])
    assert facts["verification"]["passed"]
    plan = load_plan("p.plan.json")
    assert plan.fingerprint == facts["plan"]["fingerprint"]
    assert plan.budget_bytes == 2**20
    assert "Wrote p.plan.json" in err


def test_the_command_line_in_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "--over", "batch", "--budget", "64KiB", "--least", "8", "--most", "64", "--sizes", "2,4,8", "--check", "alone"
    )
    assert status == 0, err
    for text in ("planned", "unplanned", "beyond", "with the unplanned step at batch=8: equal", "recorded at 2, 4, 8"):
        assert text in out
    assert Path("train.plan.json").is_file()


def test_the_answer_no_and_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--over", "batch", "--budget", "2KiB")
    assert (status, out) == (3, "")
    assert "even at batch=1" in err
    assert run(capsys, "--over", "batch", "--budget", "1MiB", "--set", "batch=3")[0] == 2
    status, _, err = run(capsys, "--over", "sequence", "--budget", "1MiB")
    assert status == 2
    assert "batch" in err
    assert run(capsys, "--over", "batch", "--budget", "50%")[0] == 2
