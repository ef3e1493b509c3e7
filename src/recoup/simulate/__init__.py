"""The judge: replays any plan on a step graph and says peak bytes, the timeline and seconds.

No solver's own objective is ever reported, and no plan leaves a solver unsimulated.
"""

from recoup.simulate.judge import ALWAYS, simulate, violations
from recoup.simulate.offload import Offload, offloadable
from recoup.simulate.planned import plan_holds, plan_ids, plan_offload, simulate_plan
from recoup.simulate.result import Moment, Simulation, attribution
from recoup.simulate.timeline import Course, Span, Timeline, timeline_of
from recoup.simulate.transfers import Transfer, Transfers

__all__ = [
    "ALWAYS", "Course", "Moment", "Offload", "Simulation", "Span", "Timeline", "Transfer", "Transfers", "attribution", "offloadable",
    "plan_holds", "plan_ids", "plan_offload", "simulate", "simulate_plan", "timeline_of", "violations",
]  # fmt: skip
