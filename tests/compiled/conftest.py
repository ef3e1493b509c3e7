from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles anew, on one thread, so that results compare bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
    torch.set_num_threads(before)


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, with buckets so small that DDP cuts the compiled graph into pieces."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4096)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
