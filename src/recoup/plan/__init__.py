"""Plans: data, what executors can run, file form. Plain Python, no framework."""

from recoup.plan.capabilities import LIVE, STATIC, Capabilities
from recoup.plan.plan import Decision, Plan

__all__ = ["LIVE", "STATIC", "Capabilities", "Decision", "Plan"]
