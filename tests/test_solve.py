"""The laws that every plan obeys; test_oracle.py holds solvers against every schedule of small steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import graphs
import oracle
from benchmarks.workloads import load
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities
from recoup.simulate import plan_ids, simulate, simulate_plan
from recoup.simulate.index import replays
from recoup.simulate.judge import Run
from recoup.solve import Choice, Problem, least_peak, solve, strategies_by_name
from recoup.solve.choice import droppable, prune
from recoup.solve.named import NAMED
from recoup.torch import record

EXECUTORS = st.sampled_from([LIVE, STATIC])


def budget_within(graph: StepGraph, share: float, executor: Capabilities) -> int:
    """A budget between the least feasible peak and the unplanned one."""
    least, peak = least_peak(graph, executor)[0], simulate(graph).peak_bytes
    return least + int((peak - least) * share)


@given(graphs.step_graphs(), EXECUTORS)
@settings(max_examples=40, deadline=None)
def test_the_least_peak_can_be_solved_for(graph, executor):
    least, chosen = least_peak(graph, executor)
    assert simulate(graph, chosen.recompute, executor, chosen.held_from).peak_bytes == least
    assert solve(graph, max(least, 1), gear=executor.name).peak_bytes <= least


def timed(graph: StepGraph, seed: int) -> StepGraph:
    """The same step, recorded when its operations took other times."""
    times = random.Random(seed)
    return structs.replace(graph, ops=tuple(structs.replace(op, seconds=op.seconds * times.lognormvariate(0, 1)) for op in graph.ops))


@given(st.one_of(graphs.step_graphs(), oracle.tangled_graphs()), EXECUTORS, st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_least_peak_is_a_matter_of_bytes(graph, executor, seed):
    assert least_peak(timed(graph, seed), executor)[0] == least_peak(graph, executor)[0]


@pytest.mark.parametrize("tokens", [168, 184])
def test_attention_goes_as_a_stretch(tokens):
    # No single change frees what backward needs of wide attention: all up to the probabilities must go, and none be held early.
    model, step = load("gpt2", tiny=True, layers=1, sequence=tokens)
    graph = record(step, model=model, runs=1)
    index = replays(graph)
    forward = Run(index, droppable(index, LIVE)).bytes_at[: index.turn]
    for seed in range(3):
        # The forward alone, with nothing held for the backward, needs as much.
        assert least_peak(timed(graph, seed), LIVE)[0] <= int(forward.max())


@given(graphs.step_graphs(), EXECUTORS, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_no_named_strategy_dominates(graph, executor, share):
    budget = budget_within(graph, share, executor)
    plan = solve(graph, max(budget, 1), gear=executor.name)
    for strategy in NAMED:
        found = simulate(graph, strategy.choose(Problem(graph, None, executor)).recompute, executor)
        better = found.peak_bytes <= plan.peak_bytes and found.step_seconds <= plan.step_seconds
        assert not (better and (found.peak_bytes, found.step_seconds) != (plan.peak_bytes, plan.step_seconds))


@given(graphs.step_graphs(), EXECUTORS)
@settings(max_examples=40, deadline=None)
def test_infeasible_budgets_carry_the_least_that_solves(graph, executor):
    with pytest.raises(InfeasibleBudget) as caught:
        solve(graph, 1, gear=executor.name)
    least = caught.value.least_bytes
    assert caught.value.budget_bytes == 1
    assert solve(graph, least, gear=executor.name).peak_bytes <= least


@given(st.one_of(graphs.step_graphs(), oracle.tangled_graphs()), EXECUTORS, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_a_quick_search_keeps_every_budget_that_can_be_kept_and_says_how_far_off_it_may_be(graph, executor, share):
    budget = max(budget_within(graph, share, executor), 1)
    quick, full = solve(graph, budget, gear=executor.name, effort="quick"), solve(graph, budget, gear=executor.name)
    assert simulate_plan(graph, quick).peak_bytes == quick.peak_bytes <= budget
    assert quick.bound_seconds <= full.step_seconds * (1 + 1e-9)
    again = solve(graph, budget, gear=executor.name, effort="quick")
    assert again.decisions == quick.decisions


def test_a_quick_search_of_many_layers_simulates_little(monkeypatch):
    """What a compilation can spare: some hundred thousand simulated operations at any budget that is not the least itself."""
    graph = graphs.transformer(12)
    least, peak = least_peak(graph, LIVE)[0], simulate(graph).peak_bytes
    runs = []
    monkeypatch.setattr("recoup.solve.descent.Run", lambda *args: runs.append(1) or Run(*args))
    for share in (0.05, 0.3, 0.6, 0.9):
        runs.clear()
        quick = solve(graph, least + int(share * (peak - least)), gear="live", effort="quick")
        taken = len(runs)
        full = solve(graph, quick.budget_bytes, gear="live")
        assert taken * len(graph.ops) <= 300_000
        assert quick.step_seconds <= 1.05 * full.step_seconds


@given(graphs.step_graphs(), st.sampled_from(["auto", "live", "static"]))
@settings(max_examples=30, deadline=None)
def test_a_budget_of_the_unplanned_peak_drops_nothing(graph, gear):
    plan = solve(graph, "100%", gear=gear)
    assert plan.drops_nothing
    assert plan.gap == 0
    assert plan.step_seconds == plan.unplanned_step_seconds


@given(graphs.step_graphs(), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_auto_is_no_slower_than_either_gear(graph, share):
    budget = max(budget_within(graph, share, LIVE), budget_within(graph, share, STATIC))
    plans = [solve(graph, budget, gear=gear) for gear in ("auto", "live", "static")]
    assert plans[0].step_seconds <= min(plan.step_seconds for plan in plans[1:]) * (1 + 1e-9)


@given(graphs.step_graphs(), EXECUTORS, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_plans_say_just_what_was_simulated(graph, executor, share):
    plan = solve(graph, budget_within(graph, share, executor), gear=executor.name)
    found = simulate_plan(graph, plan)
    assert (found.peak_bytes, found.step_seconds) == (plan.peak_bytes, plan.step_seconds)
    assert prune(replays(graph), plan_ids(graph, plan)) == plan_ids(graph, plan)


@pytest.mark.parametrize("strategy", [strategy.name for strategy in NAMED])
def test_named_strategies_need_no_budget(strategy):
    graph = graphs.transformer(4)
    plan = solve(graph, strategy=strategy)
    assert plan.budget_bytes == 0
    assert plan.peak_bytes == simulate_plan(graph, plan).peak_bytes
    assert plan.drops_nothing == (strategy == "none")


def test_a_named_strategy_over_the_budget_is_infeasible():
    graph = graphs.transformer(4)
    plan = solve(graph, strategy="every_block", gear="live")
    assert solve(graph, plan.peak_bytes, strategy="every_block", gear="live").recompute_sites == plan.recompute_sites
    with pytest.raises(InfeasibleBudget, match="every_block") as caught:
        solve(graph, plan.peak_bytes - 1, strategy="every_block", gear="live")
    assert caught.value.least_bytes == plan.peak_bytes


def test_every_block_keeps_block_inputs_and_spares_the_last_block():
    graph = graphs.transformer(4)
    sites = solve(graph, strategy="every_block", gear="live").recompute_sites
    assert not any(site.startswith("h.3.") for site in sites)
    assert not any(site in ("h.0/add#1", "h.1/add#1") for site in sites)
    assert "h.0.attn/softmax" in sites


def test_selective_keeps_matrix_products():
    sites = solve(graphs.transformer(4), strategy="selective", gear="live").recompute_sites
    assert "h.0.attn/softmax" in sites
    assert not any("addmm" in site for site in sites)


def test_strategies_of_others_are_simulated_too():
    class Everything:
        name = "everything"

        def choose(self, problem: Problem) -> Choice:
            return Choice(droppable(replays(problem.graph), problem.executor))

    graph = graphs.chain()
    plan = solve(graph, strategy=Everything(), gear="live")
    assert plan.strategy == "everything"
    assert plan.peak_bytes == simulate(graph, frozenset({2, 3, 4})).peak_bytes


def test_wrong_use_is_said():
    graph = graphs.chain()
    with pytest.raises(UsageError, match="every_block"):
        solve(graph, "50%", strategy="fastest")
    with pytest.raises(UsageError, match="live"):
        solve(graph, "50%", gear="third")
    with pytest.raises(UsageError, match="budget"):
        solve(graph)
    with pytest.raises(UsageError, match="'full' or 'quick', not 'hard'"):
        solve(graph, "50%", effort="hard")
    assert next(iter(strategies_by_name())) == "optimal"


def test_solving_again_gives_the_same_plan():
    graph = graphs.transformer(3)
    first, second = solve(graph, "40%"), solve(graph, "40%")
    assert first.decisions == second.decisions


def test_writes_by_other_modules_are_watched():
    build = graphs.Builder()
    x = build.standing(10, "input")
    (a,) = build.op("linear", (x,), (1000,), module="m.0")
    build.op("relu_", (a,), mutates=(a,), module="m.0.act", backward=False)
    (b,) = build.op("linear", (a,), (10,), saves=(a,), module="n")
    build.op("linear", (b,), (800,), module="n")
    plan = solve(build.backward(gradients=False), "80%", gear="live")
    assert plan.recompute_sites == {"m.0/linear"}
    assert plan.watch == ("m.0.act",)
