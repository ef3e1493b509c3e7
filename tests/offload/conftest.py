from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recoup.torch.offload import DiskStore, HostStore, Store, ThreadCopier
from recoup.torch.offload.files import filesystem_of

MIB = 2**20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the directory of temporary files is in memory; set TMPDIR to one on a disk")
    return tmp_path


@pytest.fixture(params=["disk", "host"])
def store(request: pytest.FixtureRequest, directory: Path) -> Iterator[Store]:
    made: Store = DiskStore(directory) if request.param == "disk" else HostStore(ThreadCopier(), device="cpu", limit_bytes=256 * MIB)
    yield made
    made.close()
