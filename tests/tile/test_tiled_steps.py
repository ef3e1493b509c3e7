"""Steps in tiles from end to end: regions found, simulated, solved, applied, measured and verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import recoup
from benchmarks.workloads import load
from recoup.cli import main
from recoup.errors import InfeasibleBudget, PlanMismatch, UsageError, VerifyFailure
from recoup.graph import StepGraph
from recoup.graph.rules import check
from recoup.graph.store import load as load_graph
from recoup.graph.store import save as save_graph
from recoup.graph.tiled import MADE_IN_TILES, tiled
from recoup.graph.tiles import Sample, scratch_bytes
from recoup.plan.file import load_plan, save_plan
from recoup.simulate import simulate, simulate_plan
from recoup.solve import explain, frontier, solve
from recoup.torch import apply, measure_peak, record
from recoup.torch.tile.precision import compared_with_exact, in_float64
from recoup.verify import verify
from tile.hand import Tower, tiles

Step = Callable[[], object]
PEAK = 1.05  # how far simulated and measured peak may be apart


class Dominated(nn.Module):
    """Small model, large vocabulary: called part by part, as the case in which logits dominate does it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.e = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4))


def logits_dominate(words: int = 16000, width: int = 64, batch: int = 2, sequence: int = 256) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = Dominated(words, width)
    ids, labels = torch.randint(0, words, (batch, sequence)), torch.randint(0, words, (batch, sequence))

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        h = model.e(ids)
        for block in model.blocks:
            h = h + block(h)
        loss = F.cross_entropy(model.head(h.reshape(-1, width)), labels.reshape(-1), reduction="sum")
        (loss / labels.numel()).backward()
        return loss.detach()

    return model, step


SMALL = {"layers": 2, "width": 32, "sequence": 64, "batch": 4, "vocabulary": 2000}


@functools.cache
def workload(name: str) -> tuple[nn.Module, Step, StepGraph]:
    if name == "dominated":
        model, step = logits_dominate(4000, 32, 2, 128)
    elif name == "llama":
        model, step = load("llama", hidden=256, heads=4, key_heads=2, **SMALL)
    else:
        model, step = load(name, heads=4, **SMALL)
    return model, step, record(step, model=model, runs=1, name=name)


def measured(model: nn.Module, step: Step, plan: recoup.Plan | Mapping[str, int]) -> int:
    model.zero_grad(set_to_none=True)
    with apply(model, plan if isinstance(plan, recoup.Plan) else tiles()(plan)) as applied:
        for _ in range(4):
            step()
        model.zero_grad(set_to_none=True)
        peak_bytes = measure_peak(step, model)
        assert applied.report().kept == {}
    return peak_bytes


# -- finding


def test_regions_of_a_llama() -> None:
    regions = workload("llama")[2].tileable
    assert {region.site for region in regions if not region.reason} >= {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "lm_head/cross_entropy",
    }
    # Maximal ones alone: the linears of an MLP are not regions of their own.
    assert not any(region.site.startswith("model.layers.0.mlp.") for region in regions)
    assert not any("attn" in region.site for region in regions)
    for region in regions:
        assert region.rows == 256
        assert region.error < 1e-5
        assert region.samples[0].rows == 128


def test_dropout_keeps_a_module_from_being_cut() -> None:
    reasons = {region.site: region.reason for region in workload("gpt2")[2].tileable}
    assert "draws random numbers" in reasons["transformer.h.0.mlp.dropout"]
    assert reasons["lm_head/cross_entropy"] == ""
    assert "transformer.h.0.mlp" not in reasons or "draws random numbers" in reasons["transformer.h.0.mlp"]


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "mixes rows": (lambda part, x: part(x) - part(x).mean((0, 1)), "than the whole"),
    "scales by all": (lambda part, x: part(x) / part(x).abs().max(), "than the whole"),
    "counts": (lambda part, x: part(x) + setattr_counted(part), "changes the attribute 'count'"),
    "needs its shape": (lambda part, x: part(x).view(4, 8, -1).exp().log().view(4, 8, -1), "fails on a part of its rows"),
}


def setattr_counted(part: nn.Module) -> float:
    part.count = getattr(part, "count", 0) + 1
    return 0.0


@pytest.mark.parametrize("kind", REFUSED)
def test_what_fails_the_audit_is_refused_with_the_reason(kind: str) -> None:
    run, reason = REFUSED[kind]

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 64)
            self.back = nn.Linear(64, 16)
            self.count = 0

        def inner(self, x: Tensor) -> Tensor:
            return self.back(torch.tanh(self.linear(x)).exp())

        def forward(self, x: Tensor) -> Tensor:
            return run(_Inner(self), x)

    class _Inner:
        def __init__(self, part: Part) -> None:
            object.__setattr__(self, "part", part)

        def __call__(self, x: Tensor) -> Tensor:
            return self.part.inner(x)

        def __getattr__(self, name: str) -> object:
            return getattr(self.part, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(self.part, name, value)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.part(x).square().sum() * scale

    model = Root()
    x = torch.randn(4, 8, 16)

    def step() -> None:
        model.zero_grad()
        model(x, 2.0).backward()

    graph = record(step, model=model, runs=1)
    found = {region.site: region.reason for region in graph.tileable}
    assert reason in found["part"]
    with pytest.raises(PlanMismatch, match="which the audit refused"):
        tiled(graph, {"part": 2})


@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "adam", "frozen"])
def test_kinds_of_steps(kind: str) -> None:
    model = Tower(words=2000, width=32, hidden=256)
    if kind == "bfloat16":
        model = model.bfloat16()
    if kind == "frozen":
        model.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(True)
        model.head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if kind == "adam" else None
    ids = torch.randint(2000, (4, 64))

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = model(ids, ids)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    graph = record(step, model=model, runs=1)
    chosen = {region.site: 4 for region in graph.tileable if not region.reason}
    assert set(chosen) == {"blocks.0.mlp", "blocks.1.mlp", "head/cross_entropy"}
    predicted = simulate(tiled(graph, chosen)).peak_bytes
    found = verify(model, step, structs.replace(tiles()(chosen), peak_bytes=predicted), steps=2)
    assert [check for check in found.checks if not check.passed] == []
    assert found.peak_bytes is not None
    assert found.peak_bytes <= predicted * 1.002


def test_the_head_is_the_innermost_call_that_makes_the_logits() -> None:
    class Root(nn.Module):
        """Of the same form as a head, and no head: it mixes rows."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3000))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + x.mean(1, keepdim=True))

    model = Root()
    x, targets = torch.randn(4, 16, 16), torch.randint(3000, (4, 16))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x).view(-1, 3000), targets.view(-1)).backward()

    reasons = {region.site: region.reason for region in record(step, model=model, runs=1).tileable}
    assert reasons["head.1/cross_entropy"] == ""


def test_a_loss_whose_logits_are_read_elsewhere_is_refused() -> None:
    model = Tower(words=4000)
    ids = torch.randint(4000, (4, 16))

    def step() -> None:
        model.zero_grad()
        logits = model(ids)
        (F.cross_entropy(logits.view(-1, 4000), ids.view(-1)) + logits.logsumexp(-1).mean()).backward()

    found = {region.site: region.reason for region in record(step, model=model, runs=1).tileable}
    assert "logsumexp" in found["head/cross_entropy"]
    assert "made inside of it" in found["head/cross_entropy"]


# -- the graph


@pytest.mark.parametrize("name", ["llama", "gpt2", "dominated"])
def test_simulated_peak_is_the_measured_one(name: str) -> None:
    model, step, graph = workload(name)
    sites = [region.site for region in graph.tileable if not region.reason]
    losses = [site for site in sites if "/" in site]
    for chosen in ({losses[0]: 2}, {losses[0]: 16}, dict.fromkeys(sites, 4), {site: 8 for site in sites if site not in losses}):
        step_in_tiles = tiled(graph, chosen)
        check(step_in_tiles)
        predicted = simulate(step_in_tiles).peak_bytes
        found = measured(model, step, chosen)
        assert found <= predicted * 1.002
        assert found >= predicted / PEAK


def test_a_tiled_graph() -> None:
    graph = workload("llama")[2]
    step = tiled(graph, {"model.layers.0.mlp": 4})
    assert tiled(graph, {}) is graph
    assert [op.target for op in step.ops if op.target.startswith("recoup")] == ["recoup.tiled_forward", "recoup.tiled_backward"]
    assert not any(op.module.startswith("model.layers.0.mlp.") for op in step.ops)
    assert any(op.module.startswith("model.layers.1.mlp.") for op in step.ops)
    made = [storage for storage in step.storages if storage.replayable == MADE_IN_TILES]
    assert len(made) == 1
    assert step.step_seconds > graph.step_seconds
    with pytest.raises(PlanMismatch, match="no token-wise region"):
        tiled(graph, {"model.layers.0.self_attn": 4})


def test_several_backward_passes() -> None:
    model = Tower(words=2000)
    ids = torch.randint(2000, (4, 16))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = model(ids, ids)
        loss.backward(retain_graph=True)
        loss.backward()

    graph = record(step, model=model, runs=1)
    step_in_tiles = tiled(graph, {"head/cross_entropy": 8})
    check(step_in_tiles)
    assert [op.target for op in step_in_tiles.ops].count("recoup.tiled_backward") == 2
    assert measured(model, step, {"head/cross_entropy": 8}) <= simulate(step_in_tiles).peak_bytes * 1.002


def test_two_calls_of_one_head() -> None:
    model = Tower(words=2000)
    ids = torch.randint(2000, (8, 16))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for part in ids.chunk(2):
            (model(part, part) / 2).backward()

    graph = record(step, model=model, runs=1)
    assert [region.call for region in graph.tileable if region.site == "head/cross_entropy"] == [0, 1]
    predicted = simulate(tiled(graph, {"head/cross_entropy": 8})).peak_bytes
    plan = tiles(root_calls=2)({"head/cross_entropy": 8})
    assert predicted / PEAK <= measured(model, step, plan) <= predicted * 1.002


def test_scratch_between_samples_is_never_too_low() -> None:
    moments = [(100, 7), (0, 9), (400, 1)]

    def needs(rows: int) -> int:
        return max(fixed + each * rows for fixed, each in moments)

    samples = [Sample(rows, needs(rows), 2 * needs(rows)) for rows in (128, 64, 32, 16, 8)]
    for rows in range(1, 400):
        forward, backward = scratch_bytes(samples, rows)
        assert forward >= needs(rows) - 1
        assert backward >= 2 * needs(rows) - 1


def test_the_file_of_a_graph_keeps_its_regions(tmp_path: Path) -> None:
    graph = workload("llama")[2]
    save_graph(graph, tmp_path / "llama.graph.json.gz")
    assert load_graph(tmp_path / "llama.graph.json.gz") == graph
    assert load_graph(tmp_path / "llama.graph.json.gz").fingerprint == graph.fingerprint


# -- solving


def test_a_budget_that_only_tiles_meet(tmp_path: Path) -> None:
    model, step, graph = workload("llama")
    with pytest.raises(InfeasibleBudget, match=r"allow tiles \(allow=\('tile',\), --allow tile\) of .*lm_head/cross_entropy"):
        solve(graph, "30%")
    plan = solve(graph, "30%", allow=("tile",))
    assert plan.tiles_by_module["lm_head/cross_entropy"] > 1
    assert plan.peak_bytes <= plan.budget_bytes == int(0.3 * plan.unplanned_peak_bytes)
    assert plan.fingerprint == graph.fingerprint
    assert plan.bound_seconds <= plan.step_seconds
    simulation = simulate_plan(graph, plan)
    assert (simulation.peak_bytes, simulation.step_seconds) == (plan.peak_bytes, plan.step_seconds)
    assert "lm_head/cross_entropy" in explain(graph, plan)
    assert "pieces of" in plan.explain()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.peak_bytes / PEAK <= measured(model, step, plan) <= plan.budget_bytes


def test_tiles_are_used_only_where_they_help() -> None:
    graph = workload("llama")[2]
    assert solve(graph, "100%", allow=("tile",)).drops_nothing
    for budget in ("95%", "80%"):
        assert solve(graph, budget, allow=("tile",)).step_seconds <= solve(graph, budget).step_seconds


def test_a_least_peak_with_tiles_is_stated() -> None:
    graph = workload("dominated")[2]
    with pytest.raises(InfeasibleBudget) as found:
        solve(graph, "3%", allow=("tile",))
    with pytest.raises(InfeasibleBudget) as without:
        solve(graph, "3%")
    assert found.value.least_bytes < without.value.least_bytes / 3
    assert solve(graph, found.value.least_bytes, allow=("tile",)).peak_bytes <= found.value.least_bytes


def test_unknown_permissions_are_refused() -> None:
    for wrong in (("tiles",), "tile"):
        with pytest.raises(UsageError, match="allow takes names among tile"):
            solve(workload("llama")[2], "50%", allow=wrong)


def test_a_frontier_with_tiles_is_never_above_one_without() -> None:
    graph = workload("dominated")[2]
    least = solve(graph, "30%", allow=("tile",)).peak_bytes
    budgets = [least, "60%", "99%", "100%"]
    plain, in_tiles = (frontier(graph, budgets, ["optimal"], allow=allow) for allow in ((), ("tile",)))
    assert [point.feasible for point in plain] == [False, False, True, True]
    assert all(point.feasible for point in in_tiles)
    assert in_tiles[0].tiles.startswith("head/cross_entropy in ")
    assert in_tiles[-1].tiles == ""
    assert all(one.step_seconds <= other.step_seconds for one, other in zip(in_tiles[2:], plain[2:], strict=True))
    assert [point.step_seconds for point in in_tiles] == sorted((point.step_seconds for point in in_tiles), reverse=True)


def test_a_sequence_is_longer_with_tiles() -> None:
    def make(*, sequence: int) -> tuple[nn.Module, Step]:
        return logits_dominate(2000, 16, 2, sequence)

    found = recoup.longest(make, "2MiB", over="sequence", multiple=32, most=512, sizes=(32, 64, 96), allow=("tile",), check="alone")
    assert found.plan.tiles_by_module["head/cross_entropy"] > 1
    assert found.size >= 3 * max(found.unplanned_size, 32)
    assert found.verification.passed
    assert found.measured_peak_bytes <= 2 << 20


@pytest.mark.parametrize("verb", ["solve", "fit"])
def test_on_the_command_line(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(workload("dominated")[2], tmp_path / "wide.graph.json")
    source = "wide.graph.json"
    if verb == "fit":
        Path("wide.py").write_text(
            "import sys\n"
            f"sys.path[:0] = [{str(Path(__file__).resolve().parent.parent)!r}]\n"
            "from tile.test_tiled_steps import logits_dominate\n"
            "def workload():\n    return logits_dominate(4000, 32, 2, 128)\n"
        )
        source = "wide.py:workload"
    assert main([verb, source, "--budget", "30%"]) == 3
    assert "--allow tile" in capsys.readouterr().err
    assert main([verb, source, "--budget", "30%", "--allow", "tile", "-o", "wide.plan.json"]) == 0
    out = capsys.readouterr().out
    assert "run in tiles" in out
    assert load_plan("wide.plan.json").tiles_by_module["head/cross_entropy"] > 1
    assert verb == "solve" or "largest relative error against float64" in out


# -- verifying


def test_a_fit_reports_the_error_against_float64() -> None:
    model, step, _ = workload("llama")
    with recoup.fit(model, step, "30%", allow=("tile",)) as fitted:
        verification = fitted.verification
    assert verification.passed
    details = {check.name: check.detail for check in verification.checks}
    assert "equal bit for bit" in details["result after step 1"]
    assert "largest relative error against float64" in details["gradients after step 1"]
    assert "without tiles" in details["gradients after step 1"]
    assert verification.peak_bytes is not None
    assert verification.peak_bytes <= fitted.plan.budget_bytes


def test_a_wrong_gradient_fails_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    from recoup.torch.tile import pieces

    model, step, graph = workload("dominated")
    plan = solve(graph, "30%", allow=("tile",))
    total = pieces._Sum.total
    monkeypatch.setattr(pieces._Sum, "total", lambda self: total(self).mul_(1.0001))
    found = verify(model, step, plan, measure=False)
    assert not found.passed
    with pytest.raises(VerifyFailure, match="gradients"):
        found.raise_if_failed()


def test_float64_leaves_nothing_behind() -> None:
    model, step, _ = workload("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with in_float64(model, step):
        exact = step()
        assert isinstance(exact, Tensor)
        assert exact.dtype is torch.float64
        assert all(parameter.grad is None or parameter.grad.dtype is torch.float64 for parameter in model.parameters())
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    plain = step()
    assert isinstance(plain, Tensor)
    assert float((plain.double() - exact).abs()) < 1e-5


def test_what_is_compared_with_exact_values() -> None:
    exact = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    plain = {"a": torch.tensor([1.0 + 2**-23, 2.0])}
    near, far = {"a": torch.tensor([1.0, 2.0 + 2**-22])}, {"a": torch.tensor([1.0, 2.001])}
    assert compared_with_exact(plain, near, exact, {"a": 1e-7})[0]
    assert not compared_with_exact(plain, far, exact, {"a": 1e-3})[0]
    assert not compared_with_exact(plain, near, exact, {"a": float("inf")})[0]
    assert not compared_with_exact({"a": 1}, {"a": 2}, {"a": 1}, {"a": 1.0})[0]
    astray = {"a": torch.tensor([3.0, 9.0], dtype=torch.float64)}
    assert compared_with_exact(plain, near, astray, {"a": 1e-7})[0]
    assert "another course" in compared_with_exact(plain, far, astray, {"a": 1e-3})[1]


# -- the case


def test_where_logits_dominate_the_whole_peak_falls_to_a_quarter() -> None:
    model, step = logits_dominate()
    with recoup.fit(model, step, "24%", allow=("tile",), steps=1) as fitted:
        verification = fitted.verification
    assert verification.passed
    assert verification.unplanned_peak_bytes is not None
    assert verification.peak_bytes is not None
    assert verification.unplanned_peak_bytes >= 4 * verification.peak_bytes
    with pytest.raises(InfeasibleBudget):
        solve(fitted.graph, "24%")
