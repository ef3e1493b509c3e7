"""The judge: replays any plan on a step graph and says peak bytes, the timeline and seconds.

No solver's own objective is ever reported, and no plan leaves a solver unsimulated.
"""

from recoup.simulate.judge import ALWAYS, plan_holds, plan_ids, simulate, simulate_plan, violations
from recoup.simulate.result import Moment, Simulation, attribution

__all__ = ["ALWAYS", "Moment", "Simulation", "attribution", "plan_holds", "plan_ids", "simulate", "simulate_plan", "violations"]
