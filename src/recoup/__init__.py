"""Recoup plans the activation memory of PyTorch training steps.

The public names are loaded when first used: importing ``recoup`` imports neither torch nor numpy.

    planned = recoup.fit(model, step, budget="6GiB")  # record, solve, apply, verify

    graph = recoup.record(step, model=model)
    plan = recoup.solve(graph, budget="6GiB")
    with recoup.apply(model, plan):
        step()

Steps of JAX have the same verbs in ``recoup.jax``, which is imported by itself and needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect

    from recoup.errors import CaptureError as CaptureError
    from recoup.errors import InfeasibleBudget as InfeasibleBudget
    from recoup.errors import MissingExtra as MissingExtra
    from recoup.errors import PlanMismatch as PlanMismatch
    from recoup.errors import RankDisagreement as RankDisagreement
    from recoup.errors import RecoupError as RecoupError
    from recoup.errors import ReplayMismatch as ReplayMismatch
    from recoup.errors import UsageError as UsageError
    from recoup.errors import VerifyFailure as VerifyFailure
    from recoup.fitting import fit as fit
    from recoup.graph.step import StepGraph as StepGraph
    from recoup.graph.store import load as load_graph
    from recoup.graph.store import save as save_graph
    from recoup.longest import longest as longest
    from recoup.plan.file import load_plan as load_plan
    from recoup.plan.file import save_plan as save_plan
    from recoup.plan.plan import Plan as Plan
    from recoup.simulate import simulate_plan as simulate
    from recoup.solve import explain as explain
    from recoup.solve import frontier as frontier
    from recoup.solve import solve as solve
    from recoup.torch import apply as apply
    from recoup.torch import record as record
    from recoup.verify import verify as verify

__version__ = "0.1.0"

# Public name: where it lives, and what it is called there.
_HOMES: dict[str, tuple[str, str]] = {
    "CaptureError": ("recoup.errors", "CaptureError"),
    "InfeasibleBudget": ("recoup.errors", "InfeasibleBudget"),
    "MissingExtra": ("recoup.errors", "MissingExtra"),
    "Plan": ("recoup.plan.plan", "Plan"),
    "PlanMismatch": ("recoup.errors", "PlanMismatch"),
    "RankDisagreement": ("recoup.errors", "RankDisagreement"),
    "RecoupError": ("recoup.errors", "RecoupError"),
    "ReplayMismatch": ("recoup.errors", "ReplayMismatch"),
    "StepGraph": ("recoup.graph.step", "StepGraph"),
    "UsageError": ("recoup.errors", "UsageError"),
    "VerifyFailure": ("recoup.errors", "VerifyFailure"),
    "apply": ("recoup.torch", "apply"),
    "explain": ("recoup.solve", "explain"),
    "fit": ("recoup.fitting", "fit"),
    "frontier": ("recoup.solve", "frontier"),
    "load_graph": ("recoup.graph.store", "load"),
    "load_plan": ("recoup.plan.file", "load_plan"),
    "longest": ("recoup.longest", "longest"),
    "record": ("recoup.torch", "record"),
    "save_graph": ("recoup.graph.store", "save"),
    "save_plan": ("recoup.plan.file", "save_plan"),
    "simulate": ("recoup.simulate", "simulate_plan"),
    "solve": ("recoup.solve", "solve"),
    "verify": ("recoup.verify", "verify"),
}

__all__ = [  # noqa: RUF022 - sorted as the dictionary above is
    "__version__",
    "CaptureError",
    "InfeasibleBudget",
    "MissingExtra",
    "Plan",
    "PlanMismatch",
    "RankDisagreement",
    "RecoupError",
    "ReplayMismatch",
    "StepGraph",
    "UsageError",
    "VerifyFailure",
    "apply",
    "explain",
    "fit",
    "frontier",
    "load_graph",
    "load_plan",
    "longest",
    "record",
    "save_graph",
    "save_plan",
    "simulate",
    "solve",
    "verify",
]


def _load(name: str) -> Any:
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


class _Namesake(ModuleType):
    """A sub-package that shares its name with a public function, and is called as that function.

    ``recoup.solve(graph, "6GiB")`` and ``recoup.solve.explain`` both work, whatever was imported first.
    """

    def _function(self) -> Callable[..., Any]:
        return _load(self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        import inspect

        return inspect.signature(self._function())


class _FrontDoor(ModuleType):
    """This module: where the import system binds a namesake sub-package, that sub-package is made callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value.__class__ = _Namesake
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    value = _load(name)
    # A namesake sub-package is bound by its import; it stays, and is called as the function.
    return vars(sys.modules[__name__]).setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _FrontDoor
