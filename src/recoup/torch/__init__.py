"""PyTorch, eager and compiled: record a step, apply a plan, recompute a region."""

from recoup.torch.apply import Applied, Report, apply
from recoup.torch.checkpoint import RegionReport, checkpoint
from recoup.torch.doctor import doctor
from recoup.torch.meter import measure_peak
from recoup.torch.record import record
from recoup.torch.timing import time_step

__all__ = ["Applied", "RegionReport", "Report", "apply", "checkpoint", "doctor", "measure_peak", "record", "time_step"]
