"""The command line on fakes of what runs steps; ``test_cli_end_to_end`` runs real ones."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphs
import recoup
from recoup.cli import main
from recoup.cli.arguments import derived_name
from recoup.cli.measure import choose_points
from recoup.cli.workload import load_workload, parse_sizes
from recoup.cost import OffloadLink
from recoup.errors import CaptureError, InfeasibleBudget, UsageError
from recoup.graph.store import load, save
from recoup.plan import Decision, Plan
from recoup.plan.file import load_plan, save_plan

torch = pytest.importorskip("torch")

WORKLOAD = """
from torch import nn, ones

def workload(*, layers=2, kind="plain"):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    def step():
        model(ones(2, 4)).sum().backward()
    return model, step

def three(): return 1, 2, 3
def no_model(): return "model", lambda: None
def no_step(): return nn.Linear(1, 1), 7
def fails(): raise RuntimeError("out of luck")
def neighbour():
    import beside
    return workload(layers=beside.LAYERS)
value = 3
"""
PLAN = Plan(
    fingerprint="0123456789abcdef",
    strategy="optimal",
    budget_bytes=600,
    peak_bytes=590,
    step_seconds=1.25,
    unplanned_peak_bytes=1000,
    unplanned_step_seconds=1.0,
    gap=0.0,
    decisions=(Decision(site="h.[0-11].mlp/gelu", action="recompute", bytes=400, why="cheap"),),
)


@dataclass(frozen=True)
class Point:
    strategy: str
    budget_bytes: int
    predicted_peak_bytes: int
    relative_time: float = 1.1
    gear: str = "live"
    measured_peak_bytes: int | None = None
    step_seconds: float = 0.1
    gap: float | None = None
    feasible: bool = True
    price_seconds_per_byte: float | None = None
    binding: str = ""
    tiles: str = ""


POINTS = (Point("none", 0, 1000, 1.0), *(Point("optimal", 100 * place, 100 * place - 1) for place in range(4, 10)))


@dataclass(frozen=True)
class Verified:
    passed: bool = True
    checks: tuple[Any, ...] = (SimpleNamespace(name="gradients", passed=True, detail="4 equal"),)
    peak_bytes: int = 580
    predicted_peak_bytes: int = 590
    unplanned_peak_bytes: int = 1000
    step_seconds: float = 1.2
    unplanned_step_seconds: float = 1.0
    relative_time: float = 1.2


@dataclass
class Fakes:
    """What the command line called, and what it is to get."""

    calls: dict[str, Any] = field(default_factory=dict)
    verification: Any = field(default_factory=Verified)
    error: BaseException | None = None

    def note(self, called: str, /, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls[called] = (args, kwargs)

    def record(self, step: Any, *, model: Any, runs: int = 3, name: str = "step", progress: Any = None) -> Any:
        self.note("record", model=model, runs=runs, name=name)
        return graphs.chain()

    def solve(self, graph: Any, budget: Any, **options: Any) -> Plan:
        self.note("solve", budget, **options)
        return PLAN

    def explain(self, graph: Any, plan: Plan) -> str:
        return f"a plan by {plan.strategy}"

    def frontier(self, graph: Any, **options: Any) -> tuple[Point, ...]:
        self.note("frontier", **options)
        return POINTS

    def fit(self, model: Any, step: Any, budget: Any, **options: Any) -> Any:
        self.note("fit", budget, **options)
        removed = lambda: self.note("removed")  # noqa: E731
        return SimpleNamespace(plan=PLAN, graph=graphs.chain(), verification=self.verification, remove=removed)

    def verify(self, model: Any, step: Any, plan: Plan, **options: Any) -> Any:
        self.note("verify", plan, **options)
        return self.verification

    def apply(self, model: Any, plan: Plan, gear: str | None = None) -> contextlib.nullcontext[None]:
        self.note("apply", plan)
        return contextlib.nullcontext()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    import recoup.fitting
    import recoup.solve
    import recoup.torch
    import recoup.verify

    fakes = Fakes()
    for name in ("record", "apply"):
        monkeypatch.setattr(recoup.torch, name, getattr(fakes, name))
    for name in ("solve", "explain", "frontier"):
        monkeypatch.setattr(recoup.solve, name, getattr(fakes, name))
    monkeypatch.setattr(recoup.fitting, "fit", fakes.fit)
    monkeypatch.setattr(recoup.torch, "measure_peak", lambda step, model: 590)
    monkeypatch.setattr(recoup.torch, "time_step", lambda step, repeats: 0.5)
    monkeypatch.setattr(recoup.verify, "verify", fakes.verify)
    return fakes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WORKLOAD)
    save(graphs.chain(), tmp_path / "chain.graph.json")
    save_plan(PLAN, tmp_path / "given.plan.json")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def subprocess_of(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(Path(place)) for place in (Path(recoup.__file__).parents[1], Path(graphs.__file__).parent))
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
        check=False,
    )


# What importing and starting cost.


def test_importing_recoup_imports_no_framework_and_no_numpy() -> None:
    done = subprocess_of(
        "import sys, recoup; print([name for name in ('torch', 'numpy', 'jax', 'highspy', 'rich') if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "argv", [["--version"], ["show", "chain.graph.json"], ["show", "chain.graph.json", "--ops"], ["show", "given.plan.json"]]
)
def test_what_needs_no_framework_imports_none(argv: list[str]) -> None:
    code = """
import sys
from recoup.cli import main
try:
    status = main()
except SystemExit as exit:
    status = exit.code
print(status or 0, 'torch' in sys.modules)
"""
    done = subprocess_of(code, *argv)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_solving_a_recorded_graph_imports_no_torch() -> None:
    code = "import sys; from recoup.cli import main; print(main(), 'torch' in sys.modules)"
    done = subprocess_of(code, "solve", "chain.graph.json", "--budget", "100%")
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_the_module_runs_as_a_program() -> None:
    path = str(Path(recoup.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "recoup", "--version"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True
    )
    assert done.stdout == f"recoup {recoup.__version__}\n"


# The front door.


def test_public_names_are_there() -> None:
    from recoup.errors import RecoupError

    assert recoup.RecoupError is RecoupError
    assert recoup.load_plan is load_plan
    assert recoup.load_graph is load
    assert set(recoup.__all__) <= set(dir(recoup))
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        recoup.recrod  # noqa: B018


@pytest.mark.parametrize("order", ["import recoup.solve", "from recoup.solve import strategy", "recoup.solve", "pass"])
def test_a_package_with_the_name_of_a_function_is_called_as_it(order: str) -> None:
    code = f"""
import inspect, recoup
{order}
import recoup.solve
recoup.solve.solve = lambda graph, budget: (graph, budget)
print(recoup.solve('g', budget='6GiB'), inspect.signature(recoup.solve), recoup.solve.solve('h', 1))
"""
    done = subprocess_of(code)
    assert done.stdout == "('g', '6GiB') (graph, budget) ('h', 1)\n", done.stderr


# Workloads.


def test_sizes_are_typed() -> None:
    texts = ["layers=24", "rate=0.1", "kind=big", "wide=True", "shape=(1, 2)", "text=a=b"]
    assert parse_sizes(texts) == {"layers": 24, "rate": 0.1, "kind": "big", "wide": True, "shape": (1, 2), "text": "a=b"}


@pytest.mark.parametrize("text", ["layers", "=3", "two words=3", "1x=3"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_sizes([text])


def test_a_workload_is_loaded_with_its_sizes() -> None:
    loaded = load_workload("train.py:workload", ["layers=3"])
    assert loaded.name == "train"
    assert len(loaded.model) == 3
    loaded.step()
    assert loaded.model[0].weight.grad is not None


def test_a_workload_may_import_its_neighbours(folder: Path) -> None:
    (folder / "beside.py").write_text("LAYERS = 5")
    before = list(sys.path)
    assert len(load_workload("train.py:neighbour").model) == 5
    assert sys.path == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("train.py", "written FILE.py:FUNCTION"),
        ("train:workload", "written FILE.py:FUNCTION"),
        ("train.py:", "written FILE.py:FUNCTION"),
        ("absent.py:workload", "no file absent.py"),
        ("train.py:worklaod", "no function worklaod in .*; there is workload, three"),
        ("train.py:value", "value in .* is no function but of type int"),
        ("train.py:three", r"must return \(model, step\), but returned a tuple of 3"),
        ("train.py:no_model", "model a torch.nn.Module, but it is a str"),
        ("train.py:no_step", "step a callable, but it is a int"),
    ],
)
def test_malformed_workloads_are_refused(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_workload(source)


def test_a_size_that_the_workload_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="unexpected keyword argument 'depth'; it takes layers=2, kind='plain'"):
        load_workload("train.py:workload", ["depth=3"])


def test_a_file_that_does_not_load_is_named(folder: Path) -> None:
    (folder / "broken.py").write_text("import no_such_package_here")
    with pytest.raises(UsageError, match=r"broken\.py does not load: ModuleNotFoundError"):
        load_workload("broken.py:workload")
    (folder / "broken.py").write_text("def :")
    with pytest.raises(UsageError, match="SyntaxError"):
        load_workload("broken.py:workload")


def test_a_workload_that_fails_is_a_fault() -> None:
    with pytest.raises(CaptureError, match="failed to make its model: RuntimeError: out of luck"):
        load_workload("train.py:fails")


# Verbs.


@pytest.mark.parametrize(
    ("source", "name"),
    [("a/train.py:workload", "train.x"), ("a/gpt2.graph.json.gz", "gpt2.x"), ("gpt2.json", "gpt2.x"), ("v1.5.py:w", "v1.5.x")],
)
def test_output_names_are_derived(source: str, name: str) -> None:
    assert derived_name(source, ".x") == Path(name)


def test_record_writes_a_graph(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, err = run(capsys, "record", "train.py:workload", "--set", "layers=3", "--runs", "5")
    assert status == 0
    assert load("train.graph.json.gz") == graphs.chain()
    _, options = fakes.calls["record"]
    assert (len(options["model"]), options["runs"], options["name"]) == (3, 5, "train")
    assert "6 operations" in out
    assert err == "Recording train\nWrote train.graph.json.gz\n"


def test_nothing_is_overwritten_unless_forced(capsys: pytest.CaptureFixture[str], fakes: Fakes, folder: Path) -> None:
    path = folder / "g.json"
    path.write_text("mine")
    status, out, err = run(capsys, "record", "train.py:workload", "-o", "g.json")
    assert (status, out) == (2, "")
    assert err == "recoup: g.json exists; give another name with --output, or overwrite it with --force\n"
    assert path.read_text() == "mine"
    assert fakes.calls == {}, "what cannot be written is found before the step is run"
    assert run(capsys, "record", "train.py:workload", "-o", "g.json", "--force")[0] == 0
    assert load(path) == graphs.chain()


def test_a_folder_that_is_not_there_is_found_before_the_work(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, _, err = run(capsys, "record", "train.py:workload", "-o", "absent/g.json")
    assert (status, fakes.calls) == (2, {})
    assert "no folder absent" in err


def test_solve_writes_and_explains_a_plan(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, err = run(capsys, "solve", "chain.graph.json", "--budget", "60%", "--strategy", "sqrt", "--gear", "static")
    assert (status, out, err) == (0, "a plan by optimal\n", "Wrote chain.plan.json\n")
    assert load_plan("chain.plan.json") == PLAN
    (budget,), options = fakes.calls["solve"]
    assert (budget.amount, options["strategy"], options["gear"], options["free_bytes"]) == (0.6, "sqrt", "static", None)
    assert "record" not in fakes.calls


def test_solve_as_json_is_the_plan(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    for argv in (["--format", "json", "solve"], ["solve", "--format", "json"]):
        status, out, _ = run(capsys, *argv, "chain.graph.json", "--budget", "6GiB", "--force")
        assert status == 0
        assert json.loads(out) == json.loads(Path("chain.plan.json").read_text())


def test_solve_records_a_workload(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, _, err = run(capsys, "solve", "train.py:workload", "--budget", "600")
    assert status == 0
    assert err == "Recording train\nWrote train.plan.json\n"


def test_auto_takes_what_the_device_has(capsys: pytest.CaptureFixture[str], fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recoup.torch.free.free_bytes", lambda model: 12345)
    assert run(capsys, "solve", "train.py:workload", "--budget", "auto")[0] == 0
    assert fakes.calls["solve"][1]["free_bytes"] == 12345


def test_links_come_from_what_doctor_wrote(capsys: pytest.CaptureFixture[str], fakes: Fakes, folder: Path) -> None:
    link = {"target": "disk", "write_bytes_per_second": 1e9, "read_bytes_per_second": 2e9, "where": "/scratch"}
    (folder / "links.json").write_text(json.dumps({"versions": {"recoup": "0"}, "checks": [], "links": [link]}))
    assert run(capsys, "solve", "chain.graph.json", "--budget", "60%", "--offload", "links.json")[0] == 0
    assert fakes.calls["solve"][1]["offload"] == (OffloadLink(**link),)
    (folder / "links.json").write_text("{}")
    status, _, err = run(capsys, "solve", "chain.graph.json", "--budget", "60%", "--offload", "links.json", "--force")
    assert status == 2
    assert "links.json has no links" in err
    (folder / "links.json").write_text('{"links": [{"target": "moon"}]}')
    status, _, err = run(capsys, "solve", "chain.graph.json", "--budget", "60%", "--offload", "links.json", "--force")
    assert status == 2
    assert "links.json is no file of links" in err


def test_a_named_strategy_needs_no_budget(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    assert run(capsys, "solve", "chain.graph.json", "--strategy", "sqrt")[0] == 0
    assert fakes.calls["solve"][0] == (None,)
    status, _, err = run(capsys, "solve", "chain.graph.json", "--force")
    assert status == 2
    assert "'optimal' needs --budget" in err


@pytest.mark.parametrize("argv", [["solve", "--strategy"], ["fit", "--strategy"], ["frontier", "--strategies"]])
def test_an_unknown_strategy_is_found_before_the_work(argv: list[str], capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    budget = [] if argv[0] == "frontier" else ["--budget", "60%"]
    status, _, err = run(capsys, *argv, "magic", "train.py:workload", *budget)
    assert (status, fakes.calls) == (2, {})
    assert "magic" in err


def test_sizes_do_not_go_with_a_graph(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, _, err = run(capsys, "solve", "chain.graph.json", "--budget", "60%", "--set", "layers=3")
    assert status == 2
    assert "--set goes with a workload" in err


@pytest.mark.parametrize("verb", ["solve", "fit"])
def test_a_malformed_budget_is_found_before_the_work(verb: str, capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, err = run(capsys, verb, "train.py:workload", "--budget", "6 boxes")
    assert (status, out, fakes.calls) == (2, "", {})
    assert "cannot read '6 boxes' as bytes" in err


def test_what_does_not_fit_exits_3(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.error = InfeasibleBudget("the least is 700 B", budget_bytes=1, least_bytes=700, moment="h.0/mm")
    status, out, err = run(capsys, "solve", "chain.graph.json", "--budget", "1")
    assert (status, out, err) == (3, "", "recoup: the least is 700 B\n")
    assert not Path("chain.plan.json").exists()


def test_a_step_that_cannot_be_recorded_exits_1(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.error = CaptureError("the step has no backward pass")
    assert run(capsys, "record", "train.py:workload")[::2] == (1, "Recording train\nrecoup: the step has no backward pass\n")


def test_a_fault_is_one_line_and_debug_shows_where(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.error = ZeroDivisionError("division by zero")
    argv = ("solve", "chain.graph.json", "--budget", "1")
    assert run(capsys, *argv) == (1, "", "recoup: ZeroDivisionError: division by zero (--debug shows where)\n")
    status, _, err = run(capsys, *argv, "--debug")
    assert status == 1
    assert "Traceback (most recent call last)" in err


def test_an_interrupt_exits_130(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.error = KeyboardInterrupt()
    assert run(capsys, "solve", "chain.graph.json", "--budget", "1")[0] == 130


@pytest.mark.parametrize("argv", [[], ["fly"], ["solve"], ["fit", "x.py:w"], ["solve", "x.json", "--budget", "1", "--gear", "fast"]])
def test_wrong_arguments_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_fit_writes_the_plan_and_gives_the_verdict(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, err = run(capsys, "fit", "train.py:workload", "--budget", "60%")
    assert status == 0
    assert out.startswith("a plan by optimal\n")
    assert "verified" in out
    assert err == "Fitting train into 60%\nWrote train.plan.json\n"
    assert load_plan("train.plan.json") == PLAN
    assert "removed" in fakes.calls


def test_fit_that_does_not_verify_exits_3(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.verification = Verified(passed=False)
    status, out, _ = run(capsys, "fit", "train.py:workload", "--budget", "60%", "--format", "json")
    assert status == 3
    assert json.loads(out)["verification"]["passed"] is False


def test_verify_passes_on_what_is_asked(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, _ = run(capsys, "verify", "train.py:workload", "--plan", "given.plan.json", "--steps", "4", "--gear", "static")
    assert status == 0
    assert out.startswith("verified\n")
    (plan,), options = fakes.calls["verify"]
    assert (plan, options["steps"], options["gear"]) == (PLAN, 4, "static")


def test_verify_that_fails_exits_3_and_says_so_as_json(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.verification = Verified(passed=False, checks=(SimpleNamespace(name="peak", passed=False, detail="over"),))
    status, out, _ = run(capsys, "verify", "train.py:workload", "--plan", "given.plan.json", "--format", "json")
    assert status == 3
    facts = json.loads(out)
    assert (facts["passed"], facts["relative_time"]) == (False, 1.2)
    assert facts["checks"] == [{"name": "peak", "passed": False, "detail": "over"}]


def test_frontier_as_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, _ = run(
        capsys, "frontier", "chain.graph.json", "--format", "json", "--budgets", "50%, 6GiB", "--strategies", "none,optimal"
    )
    assert status == 0
    promised = ["strategy", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "step_seconds", "relative_time", "gap"]
    points = json.loads(out)["points"]
    assert len(points) == len(POINTS)
    assert all(set(promised) <= set(point) for point in points)
    _, options = fakes.calls["frontier"]
    assert (options["budgets"], options["strategies"]) == (("50%", "6GiB"), ("none", "optimal"))


def test_frontier_writes_what_is_asked(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    pytest.importorskip("matplotlib")
    status, _, err = run(capsys, "frontier", "chain.graph.json", "--csv", "f.csv", "--figure", "f.png")
    assert status == 0
    assert err == "Wrote f.csv\nWrote f.png\n"
    rows = Path("f.csv").read_text().splitlines()
    assert rows[0].startswith("strategy,gear,budget_bytes")
    assert len(rows) == 1 + len(POINTS)
    assert run(capsys, "frontier", "chain.graph.json", "--csv", "f.csv")[0] == 2


def test_frontier_measures_points(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, out, _ = run(capsys, "frontier", "train.py:workload", "--measure", "2", "--format", "json")
    assert status == 0
    measured = json.loads(out)["measured"]
    assert [(point["budget_bytes"], point["measured_peak_bytes"], point["relative_time"]) for point in measured] == [
        (400, 590, 1.0),
        (900, 590, 1.0),
    ]
    assert fakes.calls["solve"][0] == (900,)


def test_frontier_cannot_measure_a_recorded_graph(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    status, _, err = run(capsys, "frontier", "chain.graph.json", "--measure", "2")
    assert status == 2
    assert "not a recorded graph" in err


@pytest.mark.parametrize(("count", "budgets"), [(1, [700]), (2, [400, 900]), (3, [400, 600, 900]), (9, [400, 500, 600, 700, 800, 900])])
def test_measured_points_are_spread(count: int, budgets: list[int]) -> None:
    assert [point.budget_bytes for point in choose_points(POINTS, count)] == budgets  # type: ignore[arg-type]


def test_show_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "show", "chain.graph.json")
    assert (status, err) == (0, "")
    assert "6 operations, 8 storages" in out
    facts = json.loads(run(capsys, "show", "chain.graph.json", "--format", "json")[1])
    assert (facts["operations"], facts["peak_bytes"]) == (6, 960)


def test_show_operations(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "chain.graph.json", "--ops", "--limit", "1")
    assert "  %2 u8[100] = layers.0/relu(i:input1, w:parameter0) 1.00s 100B saved recompute-ok\n  ... 2 more\n" in out
    assert len(json.loads(run(capsys, "show", "chain.graph.json", "--ops", "--format", "json")[1])["ops"]) == 6


def test_show_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "chain.graph.json", "--peak")
    assert out.startswith("peak at ")
    facts = json.loads(run(capsys, "show", "chain.graph.json", "--peak", "--format", "json")[1])
    assert facts["peak_bytes"] == 960
    assert sum(place["bytes"] for place in facts["places"]) == 960


def test_show_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "given.plan.json")
    assert "h.[0-11].mlp/gelu" in out
    assert json.loads(run(capsys, "show", "given.plan.json", "--format", "json")[1])["strategy"] == "optimal"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["given.plan.json", "--peak"], "is a plan; --peak, --timeline and --ops go with a graph"),
        (["absent.json"], "no file absent.json"),
        (["train.py"], "is neither a step graph nor a plan"),
        (["other.json"], "is neither a step graph nor a plan: it has no field"),
        (["chain.graph.json", "--module", "0"], "--module must be at least 1"),
        (["chain.graph.json", "--plan", "given.plan.json"], "--plan goes with --peak"),
    ],
)
def test_show_refuses_what_it_cannot_show(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text('{"format": 1}')
    status, out, err = run(capsys, "show", *argv)
    assert (status, out) == (2, "")
    assert message in err


def test_quiet_leaves_only_data(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    for argv in (["-q", "solve"], ["solve", "--quiet"]):
        _, out, err = run(capsys, *argv, "chain.graph.json", "--budget", "60%", "--force")
        assert (out, err) == ("a plan by optimal\n", "")


def test_doctor_gives_versions_and_tests(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import recoup.torch

    checks = [SimpleNamespace(name="private hooks", passed=True, detail="")]
    monkeypatch.setattr(recoup.torch, "doctor", lambda: checks, raising=False)
    status, out, _ = run(capsys, "doctor", "--format", "json")
    facts = json.loads(out)
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    # JAX's own checks follow where it is installed.
    assert [check["name"] for check in facts["checks"]][:2] == ["allocator meter", "private hooks"]
    assert status == 0
    checks.append(SimpleNamespace(name="broken", passed=False, detail="gone"))
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "FAILED" in out


def test_colours_and_bars_stay_out_of_files(folder: Path) -> None:
    done = subprocess_of("from recoup.cli import main; main()", "show", "given.plan.json", FORCE_COLOR="")
    assert "\x1b" not in done.stdout + done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    path = os.pathsep.join((str(Path(recoup.__file__).parents[1]),))
    save(graphs.transformer(12), "big.graph.json")
    command = f"'{sys.executable}' -m recoup show big.graph.json --ops | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert done.stdout.startswith("transformer-12 ")
    assert done.stderr == ""
