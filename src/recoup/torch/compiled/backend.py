"""``torch.compile(model, backend="recoup", options={"budget": "6GiB"})``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from recoup.errors import UsageError
from recoup.plan import Plan
from recoup.torch.compiled.budgeted import Budgeted, Settings
from recoup.torch.compiled.interfaces import Compiler, aten_compiler, inductor_compiler
from recoup.torch.compiled.session import Session
from recoup.torch.compiled.switch import active_session
from recoup.units import parse_budget, parse_bytes

__all__ = ["compiled_plan", "recoup_backend"]

_OWN = ("budget", "kernels", "strategy", "standing_bytes", "results", "effort", "time_limit_seconds", "step")
_sessions: dict[tuple[Settings, tuple[tuple[str, str], ...]], tuple[Session, Budgeted]] = {}


def recoup_backend(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a graph so that the step stays within a budget of bytes; what ``torch.compile`` calls.

    Args:
        gm: the graph that dynamo captured.
        inputs: its example inputs.
        options: ``budget`` (``"6GiB"``, ``"60%"`` of the unplanned peak, or bytes), and where wanted ``kernels``
            (``inductor`` or ``aten``), ``strategy``, ``standing_bytes``, ``results``, ``effort``, ``time_limit_seconds`` and ``step``
            (see ``Settings``); all else goes to Inductor. Graphs compiled with equal options are taken for one step and share its
            budget. While a plan is applied to the model, or its step is recorded, that decides, and no budget is needed.

    Raises:
        UsageError: an option is missing or malformed.
        InfeasibleBudget: no plan fits the budget; the error has the least peak found.
    """
    options = options or {}
    kernels = options.get("kernels", "inductor")
    others = {name: value for name, value in options.items() if name not in _OWN}
    compiler = _compiler(kernels, others)
    session = active_session()
    if session is None:
        session = _session(_settings(options), others)[0]
    return session.handle(gm, inputs, compiler)


def compiled_plan(options: Mapping[str, Any]) -> Plan | None:
    """The plan that the graphs compiled with these options run now; None before the first is compiled."""
    others = {name: value for name, value in options.items() if name not in _OWN}
    return _session(_settings(options), others)[1].plan


def _compiler(kernels: object, others: Mapping[str, Any]) -> Compiler:
    if kernels == "inductor":
        return inductor_compiler(others)
    if kernels != "aten":
        raise UsageError(f"kernels is 'inductor' or 'aten', not {kernels!r}")
    if others:
        raise UsageError(f"no option is called {next(iter(others))!r} with kernels='aten'; there are {', '.join(_OWN)}")
    return aten_compiler()


def _settings(options: Mapping[str, Any]) -> Settings:
    if "budget" not in options:
        raise UsageError(
            "backend='recoup' needs a budget: torch.compile(model, backend='recoup', options={'budget': '6GiB'}); or use recoup.fit"
        )
    standing, results = options.get("standing_bytes", 0), options.get("results", "held")
    if results not in ("held", "released"):
        raise UsageError(f"results is 'held' or 'released', not {results!r}")
    return Settings(
        budget=parse_budget(options["budget"]),
        kernels=options.get("kernels", "inductor"),
        strategy=options.get("strategy", "optimal"),
        standing_bytes=parse_bytes(standing) if isinstance(standing, str) else int(standing),
        results=results,
        effort=options.get("effort", "quick"),
        time_limit_seconds=float(options.get("time_limit_seconds", 20.0)),
        step=str(options.get("step", "")),
    )


def _session(settings: Settings, others: Mapping[str, Any]) -> tuple[Session, Budgeted]:
    key = (settings, tuple(sorted((name, repr(value)) for name, value in others.items())))
    if key not in _sessions:
        chooser = Budgeted(settings)
        session = chooser.session = Session(chooser)
        _sessions[key] = (session, chooser)
    return _sessions[key]
