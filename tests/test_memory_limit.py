"""A step that the operating system refuses for its memory trains once it is planned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The child prints one line for each stage; the parent compares them with what must happen.
CHILD = """
import ctypes, gc, resource
import torch
from torch import nn

import recoup

torch.set_num_threads(1)
ctypes.CDLL(None).malloc_trim(0)

LAYERS, WIDTH, BATCH = 24, 64, 8192
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
x = torch.randn(BATCH, WIDTH)


def step():
    model.zero_grad()
    model(x).square().mean().backward()


def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


graph = recoup.record(step, model=model, runs=1)
plan = recoup.solve(graph, "40%", gear="live")
step()
want = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
stands = sum(p.nbytes for p in model.parameters()) + x.nbytes
plain, planned = graph.measured_peak_bytes - stands, plan.peak_bytes - stands
# Half way between what the two need above what stands now.
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (plain + planned) // 2,) * 2)
print("room", plain - planned >= 40 * 2**20)
try:
    step()
except (RuntimeError, MemoryError) as error:
    print("plain", "can't allocate memory" in str(error) or isinstance(error, MemoryError))
else:
    print("plain ran")
model.zero_grad()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with recoup.apply(model, plan) as applied:
    for number in range(3):
        step()
        print("planned", all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want)))
    print("dropped", applied.report().dropped_bytes > 0)
try:
    step()
except (RuntimeError, MemoryError):
    print("plain again True")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts anonymous memory on Linux only")
def test_a_planned_step_trains_where_the_plain_one_runs_out_of_memory() -> None:
    # Large blocks come from the system and go back to it at once; one arena for the rest.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n") == ["room True", "plain True", *["planned True"] * 3, "dropped True", "plain again True", ""], (
        done.stderr
    )
