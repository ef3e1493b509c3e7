"""Plans: data, what executors can run, file form. Plain Python, no framework."""

from recoup.plan.capabilities import COMPILED, JIT, LIVE, STATIC, Capabilities, gears_of
from recoup.plan.plan import Decision, Plan, Traffic

__all__ = ["COMPILED", "JIT", "LIVE", "STATIC", "Capabilities", "Decision", "Plan", "Traffic", "gears_of"]
