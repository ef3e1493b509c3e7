"""Plans for other trainers, as their own settings.

No trainer can say all that a plan can. So each export looks for the fastest setting of that trainer that fits, judged like any
other plan, and says what it costs beside the plan itself: nothing is lost in silence.
"""

from recoup.job.export.formats import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
