"""Planning of jobs too big to run here: layers as tables, parallelism, schedules, memory and time. No framework.

job = Job(preset("gpt-175b"), Layout(tensor=8, pipeline=8, data=8, global_batch=512), device("a100"))
plan = plan_job(job)
"""

from recoup.job.advice import Change, advise
from recoup.job.curve import Point, curve
from recoup.job.file import load_job
from recoup.job.huggingface import read_config
from recoup.job.job import Estimate, Job
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.model import Model
from recoup.job.plan import JobPlan, plan_job
from recoup.job.presets import preset, preset_names
from recoup.job.sweep import Outcome, layouts, sweep

__all__ = [
    "Change",
    "Estimate",
    "Job",
    "JobPlan",
    "Kernels",
    "Layout",
    "Model",
    "Numbers",
    "Outcome",
    "Point",
    "advise",
    "curve",
    "layouts",
    "load_job",
    "plan_job",
    "preset",
    "preset_names",
    "read_config",
    "sweep",
]
