"""The static gear: taken after calls that ran alike, left when a guard trips, and never wrong without an error before weights move."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from cases.situations import Result, Step, everything, plan_equals_plain, same
from recoup.errors import ReplayMismatch
from recoup.torch import Applied, apply, record
from recoup.torch.private import below_modes, outer_saved_tensor_hooks
from recoup.torch.promotion import WARM_UP_CALLS


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    gc.enable()
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None


class Net(nn.Module):
    """Scales by an attribute where guards look, and by numbers in a list where none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm, self.drop = nn.BatchNorm1d(48), nn.Dropout(0.5)
        self.scale = 0.5
        self.hidden = [1.5]
        self.extra = [0]
        self.drop.eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)) * self.scale)
        if self.extra[0] == 1:
            h = torch.tanh(torch.cat([h, h]))[: x.shape[0]]
        if self.extra[0] == 2:
            h = h.sin().cos()
        h = torch.sin(h.clamp(min=-10.0 * self.hidden[0]) * self.hidden[-1])
        return torch.tanh(self.second(self.drop(h)))


class Bench:
    """One model under a static plan and a twin without, stepped together and compared."""

    def __init__(self, audit_every: int = 1000, lr: float = 0.05) -> None:
        torch.manual_seed(0)
        self.plain, self.model = Net(), Net()
        self.model.load_state_dict(self.plain.state_dict())
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model in (self.plain, self.model)]
        x = torch.ones(24, 32)
        graph = record(lambda: self.model(x).square().sum().backward(), model=self.model, runs=1)
        self.applied: Applied = apply(self.model, everything(graph, "static"), "static", audit_every=audit_every)
        self.moment: Callable[[nn.Module], None] = lambda model: None
        self.seed = 0

    def both(self, change: Callable[[Net], object]) -> None:
        for model in (self.plain, self.model):
            change(model)

    def step(self, rows: int = 24, autocast: bool = False, between: Callable[[Net], object] | None = None) -> None:
        """One training step of both; everything it leaves is compared."""
        self.seed += 1
        left: list[Result] = []
        for model, optimizer in zip((self.plain, self.model), self.optimizers, strict=True):
            torch.manual_seed(self.seed)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(rows, 32)).float().square().sum()
            if between is not None and model is self.model:
                between(model)
            loss.backward()
            grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            left.append({**grads, **{f"value {name}": value.clone() for name, value in model.state_dict().items()}, "loss": loss.detach()})
        wrong = [name for name in left[0] if not same(left[0][name], left[1][name])]
        assert wrong == [], f"step {self.seed}"

    def steps(self, count: int, rows: int = 24) -> None:
        for _ in range(count):
            self.step(rows)

    @property
    def counts(self) -> tuple[int, int]:
        """Calls so far, live and static."""
        report = self.applied.report()
        return report.live_calls, report.static_calls

    @property
    def refusals(self) -> dict[str, int]:
        return self.applied.report().static_refusals

    def static(self) -> Bench:
        """Trained until the gear has taken over."""
        self.steps(WARM_UP_CALLS + 2)
        assert self.counts == (WARM_UP_CALLS, 2)
        assert self.refusals == {}
        return self


def test_it_takes_over_after_three_calls_that_ran_alike() -> None:
    bench = Bench()
    for number in range(1, 9):
        bench.step()
        assert bench.counts == (min(number, WARM_UP_CALLS), max(0, number - WARM_UP_CALLS))
    report = bench.applied.report()
    assert report.gear == "static"
    assert report.dropped_bytes > 0
    assert report.static_refusals == {}
    assert WARM_UP_CALLS == 3


# -- guards

CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "training flag": (lambda model: model.norm.eval(), "'training'"),
    "dropout switched on": (lambda model: model.drop.train(), "'training'"),
    "whole model in eval": (lambda model: model.eval(), "'training'"),
    "scale": (lambda model: setattr(model, "scale", 0.25), "'scale' of a module has changed from 0.5 to 0.25"),
    "new type of a scale": (lambda model: setattr(model, "scale", torch.tensor(0.25)), "'scale' of a module has changed"),
    "frozen weight": (lambda model: model.first.weight.requires_grad_(False), "a flag"),
    "frozen layer": (lambda model: model.second.requires_grad_(False), "a flag"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_guards_see_runs_live(name: str) -> None:
    change, reason = CHANGES[name]
    bench = Bench().static()
    bench.both(change)
    live, static = bench.counts
    bench.steps(2)
    assert bench.counts == (live + 2, static)
    assert sum(bench.refusals.values()) >= 1
    assert any(reason in text for text in bench.refusals)
    bench.steps(WARM_UP_CALLS + 1)
    assert bench.counts[1] > static  # it has taken over again


def test_a_change_back_and_forth_is_right_at_every_step() -> None:
    bench = Bench().static()
    for number in range(12):
        bench.both(lambda model, number=number: setattr(model, "scale", 0.5 if number // 2 % 2 else 0.75))
        bench.step()
    assert sum(bench.refusals.values()) >= 1


def test_autocast_is_a_guard() -> None:
    bench = Bench().static()
    live, static = bench.counts
    bench.step(autocast=True)
    assert bench.counts == (live + 1, static)
    assert any("autocast" in reason for reason in bench.refusals)
    # Under autocast a replay reads a cast copy of a weight, which only the live gear sees.
    for _ in range(WARM_UP_CALLS + 1):
        bench.step(autocast=True)
    assert bench.counts[1] == static
    assert any("kept for replays only" in reason for reason in bench.refusals)
    bench.steps(WARM_UP_CALLS + 2)
    assert bench.counts[1] == static + 2


def test_an_argument_that_is_a_number_is_a_guard() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return torch.sin(torch.tanh(self.linear(x)) * scale)

    scales = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    model, x, at = Scaled(), torch.randn(24, 32), [0]

    def step() -> Tensor:
        model.zero_grad()
        model(x, scales[at[0]]).sum().backward()
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad.clone()

    def all_steps() -> list[Tensor]:
        found = []
        for number in range(len(scales)):
            at[0] = number
            found.append(step())
        return found

    base = all_steps()
    at[0] = 0
    plan = everything(record(step, model=model, runs=1), "static")
    with apply(model, plan, "static") as applied:
        assert same(base, all_steps())
        report = applied.report()
    assert (report.live_calls, report.static_calls) == (6, 2)
    assert report.static_refusals == {"autocast, a flag or a plain argument has changed": 1}


# -- what no guard sees


def refused(bench: Bench) -> ReplayMismatch:
    """A step that must raise, with neither a weight nor an optimizer state moved; the twin is put back to before it."""
    model, optimizer = bench.model, bench.optimizers[1]
    plain = copy.deepcopy((bench.plain.state_dict(), bench.optimizers[0].state_dict()))
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    assert state
    with pytest.raises(ReplayMismatch) as caught:
        bench.step()
    assert same(weights, [p.detach() for p in model.parameters()])
    assert same(state, optimizer.state_dict()["state"])
    bench.plain.load_state_dict(plain[0])
    bench.optimizers[0].load_state_dict(plain[1])
    model.load_state_dict(plain[0])  # the forward has moved the statistics of the norm
    return caught.value


def test_a_number_that_no_guard_sees_is_caught_in_the_backward() -> None:
    bench = Bench().static()
    live, static = bench.counts
    bench.both(lambda model: model.hidden.append(2.5))
    error = refused(bench)
    assert "/sin" in str(error)
    assert "No weight has moved; run the step again" in str(error)
    assert bench.counts == (live, static + 1)
    # The next steps run live, and then the gear takes over with the new number.
    bench.steps(WARM_UP_CALLS)
    assert bench.counts == (live + WARM_UP_CALLS, static + 1)
    bench.steps(2)
    assert bench.counts == (live + WARM_UP_CALLS, static + 3)
    assert list(bench.refusals.values()) == [1]


def test_a_branch_of_other_shapes_in_the_middle_of_a_forward() -> None:
    """What was dropped before the branch is rebuilt as it was; what comes after it is kept."""
    bench = Bench().static()
    live, static = bench.counts
    bench.both(lambda model: model.extra.__setitem__(0, 1))
    bench.step()
    assert bench.counts == (live, static + 1)
    assert list(bench.refusals) == ["saved tensor 8 is torch.float32 [48, 48] where the program has torch.float32 [24, 48]"]
    bench.steps(WARM_UP_CALLS + 1)
    assert bench.counts == (live + WARM_UP_CALLS, static + 2)


def test_a_branch_of_the_same_shapes_is_caught_in_the_backward() -> None:
    bench = Bench().static()
    live, static = bench.counts
    bench.both(lambda model: model.extra.__setitem__(0, 2))
    assert "/sin" in str(refused(bench))
    bench.steps(WARM_UP_CALLS + 1)
    assert bench.counts == (live + WARM_UP_CALLS, static + 2)
    assert sum(bench.refusals.values()) == 1


def resumed(bench: Bench) -> Bench:
    """Both twins from one state again."""
    bench.model.load_state_dict(bench.plain.state_dict())
    for optimizer in bench.optimizers:
        optimizer.state.clear()
    return bench


def test_leaving_the_program_never_gives_a_wrong_gradient() -> None:
    """Whatever branch comes when, a step is right or raises before weights move."""
    bench = Bench()
    raised = 0
    for branch in (0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 2, 2):
        bench.both(lambda model, branch=branch: model.extra.__setitem__(0, branch))
        try:
            bench.step()
        except ReplayMismatch:
            raised += 1
            resumed(bench)
            bench.step()  # again, as the message says
    assert bench.counts[1] > 0
    assert sum(bench.refusals.values()) >= 1
    assert raised <= 4


def test_weights_written_between_forward_and_backward() -> None:
    bench = Bench().static()

    def write(model: Net) -> None:
        with torch.no_grad():
            model.second.weight.mul_(2)
            model.first.weight.mul_(2)

    static = bench.counts[1]
    with pytest.raises(ReplayMismatch, match=r"modified by an inplace operation"):
        bench.step(between=write)
    assert bench.counts[1] == static + 1
    resumed(bench).steps(WARM_UP_CALLS + 2)


# -- audits


def test_an_audit_finds_a_change_that_shows_nowhere() -> None:
    """A bound that clamps nothing has changed: no number differs, so probes are silent; the audit compares the programs."""
    bench = Bench(audit_every=4)
    bench.steps(WARM_UP_CALLS + 3)
    assert bench.counts == (WARM_UP_CALLS, 3)
    bench.both(lambda model: model.hidden.insert(0, 2.0))
    bench.step()  # the audit
    assert bench.counts == (WARM_UP_CALLS + 1, 3)
    assert bench.refusals == {"an audit found that the step no longer runs as it did": 1}
    bench.steps(WARM_UP_CALLS + 2)
    assert bench.counts[1] > 3


def test_audits_come_as_often_as_asked_for() -> None:
    bench = Bench(audit_every=4)
    bench.steps(WARM_UP_CALLS + 12)
    assert bench.counts == (WARM_UP_CALLS + 3, 9)
    assert bench.refusals == {}


# -- what changes and may


def test_shapes_that_alternate_are_learned_apart() -> None:
    bench = Bench()
    for _ in range(6):
        bench.step(24)
        bench.step(16)
    assert bench.counts == (2 * WARM_UP_CALLS, 6)
    assert bench.refusals == {}
    assert bench.applied.report().unplanned_shapes == ("16x32:float32",)
    bench.step(8)
    bench.step(24)
    assert bench.counts == (2 * WARM_UP_CALLS + 1, 7)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_may_move_between_steps(kind: Callable[..., torch.optim.Optimizer]) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Net()
        optimizer = kind(model.parameters(), lr=0.05)

        def step() -> Result:
            optimizer.zero_grad()
            model(torch.randn(24, 32)).square().sum().backward()
            optimizer.step()
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

        return model, step

    report = plan_equals_plain(make, "static", steps=10)
    assert report.static_calls == 10 - WARM_UP_CALLS


def test_a_parameter_may_be_replaced_by_another() -> None:
    bench = Bench().static()
    value = torch.randn(32, 48)
    bench.both(lambda model: setattr(model.second, "weight", nn.Parameter(value.clone())))
    bench.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (bench.plain, bench.model)]
    bench.steps(3)
    assert bench.counts[1] > 2
