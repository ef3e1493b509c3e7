"""The formats by name, and what an exported setting costs beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recoup.errors import InfeasibleBudget, UsageError
from recoup.job.export import maxtext, megatron, torchtitan
from recoup.job.export.candidates import Setting, best_setting
from recoup.job.export.recoup_plan import stage_plan
from recoup.job.job import Job
from recoup.job.plan import JobPlan
from recoup.plan.file import plan_json
from recoup.units import format_bytes

__all__ = ["FORMATS", "Exported", "export"]

_SETTINGS: dict[str, tuple[Callable[[Job], Iterator[Setting]], Callable[[Job], str], str]] = {
    "megatron": (megatron.settings, megatron.layout_flags, " "),
    "torchtitan": (torchtitan.settings, torchtitan.layout_section, "\n\n"),
    "maxtext": (maxtext.settings, lambda job: "", "\n"),
}
FORMATS = (*_SETTINGS, "recoup")


@dataclass(frozen=True, slots=True)
class Exported:
    """What a trainer is to be told.

    Attributes:
        format: of the text.
        text: the settings.
        peak_bytes: with these settings.
        step_seconds: with these settings.
        slower: step time over the plan's, less 1.
    """

    format: str
    text: str
    peak_bytes: int
    step_seconds: float
    slower: float


def export(plan: JobPlan, name: str, stage: int = 0) -> Exported:
    """The fastest settings of a trainer that fit the plan's limit, or for ``recoup`` the plan file of one stage.

    Raises:
        UsageError: no format has that name, or it cannot say what the plan does.
        InfeasibleBudget: no setting of that trainer fits, though the plan does.
    """
    seconds = plan.estimate.step_seconds
    if name == "recoup":
        return Exported(name, plan_json(stage_plan(plan, stage)), plan.estimate.peak_bytes, seconds, 0.0)
    if name not in _SETTINGS:
        raise UsageError(f"no format is called {name!r}; there are {', '.join(FORMATS)}")
    settings, layout, between = _SETTINGS[name]
    candidates = list(settings(plan.job))
    best = best_setting(plan.job, plan.limit_bytes, candidates)
    if best is None:
        least = min(plan.job.estimate_of(setting.groups).peak_bytes for setting in candidates)
        raise InfeasibleBudget(
            f"no setting of {name} fits {format_bytes(plan.limit_bytes)}: the least takes {format_bytes(least)},"
            f" where the plan takes {format_bytes(plan.estimate.peak_bytes)}; allow that much, or run the plan with Recoup",
            budget_bytes=plan.limit_bytes, least_bytes=least, moment=name,
        )  # fmt: skip
    setting, estimate = best
    text = between.join(part for part in (layout(plan.job), setting.text) if part)
    return Exported(name, text + "\n", estimate.peak_bytes, estimate.step_seconds, estimate.step_seconds / seconds - 1)
