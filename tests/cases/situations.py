"""How a situation is tested: one step run plainly, with ``checkpoint`` around its regions, and under a plan in both gears.

All that a step returns, and all that it leaves in the model, must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recoup.graph import StepGraph
from recoup.plan import Plan
from recoup.simulate.index import replays
from recoup.solve import Choice, Problem, solve
from recoup.solve.choice import droppable, runnable
from recoup.torch import RegionReport, Report, apply, checkpoint, record
from recoup.torch.state import own_attributes, same_bits

Result = dict[str, object]
Step = Callable[[], Result]
Region = Callable[..., Any]

GEARS = ("live", "static")
_STEPS = 6  # the static gear runs from the fourth call on


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """No recomputation."""
    return fn(*args, **kwargs)


class Regions:
    """``checkpoint``, with the reports of all its calls added up."""

    def __init__(self) -> None:
        self.reports: list[RegionReport] = []

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.reports.append(RegionReport())
        return checkpoint(fn, *args, report=self.reports[-1], **kwargs)

    @property
    def dropped_bytes(self) -> int:
        return sum(report.dropped_bytes for report in self.reports)

    @property
    def copied_bytes(self) -> int:
        return sum(report.copied_bytes for report in self.reports)

    @property
    def kept(self) -> dict[str, str]:
        return {site: reason for report in self.reports for site, reason in report.kept.items()}


@dataclass(frozen=True)
class Everything:
    """The strategy that drops all that this executor can rebuild."""

    name: str = "everything"

    def choose(self, problem: Problem) -> Choice:
        index = replays(problem.graph)
        return Choice(runnable(index, droppable(index, problem.executor), problem.executor))


def everything(graph: StepGraph, gear: str) -> Plan:
    """A plan that recomputes all that may be recomputed."""
    return solve(graph, strategy=Everything(), gear=gear)


def same(left: object, right: object) -> bool:
    """Whether two results are equal, tensors bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left.detach(), right.detach())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


def differing(base: Result, got: Result) -> list[str]:
    """What differs."""
    return [name for name in {**base, **got} if name not in base or name not in got or not same(base[name], got[name])]


def left_behind(model: nn.Module) -> Result:
    """Gradients, buffers and plain attributes of a model, and where the random numbers stand."""
    found: Result = {f"grad {name}": p.grad for name, p in model.named_parameters()}
    found.update({f"buffer {name}": value for name, value in model.named_buffers()})
    found.update({f"{name}.{key}": value for name, module in model.named_modules() for key, value in own_attributes(module).items()})
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()} | {
        "generator": torch.get_rng_state()
    }


def regions_equal_plain(run: Callable[[Region], Result], *, drops: bool = True) -> Regions:
    """Run a step plainly and with ``checkpoint``; whether anything is to be dropped is checked too."""
    torch.manual_seed(0)
    base = run(plain)
    torch.manual_seed(0)
    regions = Regions()
    got = run(regions)
    assert differing(base, got) == []
    assert bool(regions.dropped_bytes) == drops
    return regions


def plan_equals_plain(
    make: Callable[[], tuple[nn.Module, Step]], gear: str, *, drops: bool = True, static: bool = True, steps: int = _STEPS
) -> Report:
    """Run a model's steps plainly and under a plan that drops everything it may, and compare after each.

    Args:
        make: a fresh model and its step; called under a fixed seed.
        gear: ``live`` or ``static``.
        drops: whether the plan has anything to drop.
        static: whether the static gear is expected to take over.
        steps: how many.
    """
    bases = _run(make, steps)
    torch.manual_seed(0)
    model, step = make()
    plan = everything(record(step, model=model), gear)
    assert plan.drops_nothing == (not drops)
    torch.manual_seed(0)
    model, step = make()
    with apply(model, plan, gear=gear) as applied:
        torch.manual_seed(1)
        for number in range(steps):
            got = step() | left_behind(model)
            assert differing(bases[number], got) == [], f"step {number} in the {gear} gear"
        report = applied.report()
    if drops:
        assert report.dropped_bytes > 0
        assert bool(report.static_calls) == (gear == "static" and static), report
    return report


def _run(make: Callable[[], tuple[nn.Module, Step]], steps: int) -> list[Result]:
    torch.manual_seed(0)
    model, step = make()
    torch.manual_seed(1)
    return [step() | left_behind(model) for _ in range(steps)]


def planned(make: Callable[[], tuple[nn.Module, Step]], gear: str) -> tuple[nn.Module, Step, Plan]:
    """A fresh model with its step, and a plan that drops all it may."""
    torch.manual_seed(0)
    model, step = make()
    plan = everything(record(step, model=model), gear)
    torch.manual_seed(0)
    model, step = make()
    return model, step, plan
