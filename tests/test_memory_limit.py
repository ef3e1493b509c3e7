"""A step that the operating system refuses for its memory trains once it is planned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

COMMON = """
import gc, resource, sys
import torch
from torch import nn

import recoup

torch.set_num_threads(1)
LAYERS, WIDTH, BATCH = 24, 64, 8192
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
x = torch.randn(BATCH, WIDTH)
stands = sum(p.nbytes for p in model.parameters()) + x.nbytes


def step():
    model.zero_grad()
    model(x).square().mean().backward()

"""

# Prints what the plain and the planned step need above what stands before them.
PLANNER = """
graph = recoup.record(step, model=model, runs=1)
plan = recoup.solve(graph, "40%", gear="live")
plan.save(sys.argv[1])
print(graph.measured_peak_bytes - stands, plan.peak_bytes - stands)
"""

# A process of its own: what recording and solving freed, but the allocator did not give back, would serve the plain step beyond the limit.
# Prints one line for each stage; the test compares them with what must happen.
TRAINER = """
import ctypes

# Loaded before the limit stands: what modules take is not the step's.
apply, plan = recoup.apply, recoup.load_plan(sys.argv[1])
plain, planned = int(sys.argv[2]), int(sys.argv[3])


def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def attempt():
    try:
        step()
    except (RuntimeError, MemoryError) as error:
        return "can't allocate memory" in str(error) or isinstance(error, MemoryError)
    return "ran"


def tidy():
    model.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


step()
want = [p.grad.clone() for p in model.parameters()]
tidy()
# Half way between what the two need above what stands now.
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (plain + planned) // 2,) * 2)
print("room", plain - planned >= 40 * 2**20)
print("plain", attempt())
tidy()
with apply(model, plan) as applied:
    for number in range(3):
        step()
        print("planned", all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want)))
    print("dropped", applied.report().dropped_bytes > 0)
print("plain again", attempt())
"""


def child(code: str, *arguments: str) -> str:
    """What a fresh process prints that runs the code under an allocator that gives large blocks back at once."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", COMMON + code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts anonymous memory on Linux only")
def test_a_planned_step_trains_where_the_plain_one_runs_out_of_memory(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    stages = child(TRAINER, plan, *child(PLANNER, plan).split()).split("\n")
    assert stages == ["room True", "plain True", *["planned True"] * 3, "dropped True", "plain again True", ""]
