"""The nameless file behind a disk store: gone from its directory before the first byte is written, so that any death of the process,
kill -9 included, gives its space back.

``O_TMPFILE`` makes a file without a name at all; filesystems without it get a named one that is unlinked at once (a process that dies
between the two leaves an empty file). ``O_DIRECT`` keeps the bytes out of the page cache, which is memory too; where it is not to be had,
reads and writes are buffered and the cache is told to let go of them.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from recoup.errors import OffloadError
from recoup.torch.offload.buffers import PageBuffer
from recoup.torch.offload.extents import BLOCK

__all__ = ["SpoolFile", "filesystem_of", "free_bytes", "open_spool"]

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})  # filesystem or kernel lacks it
_NO_DIRECT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})  # some say so when the file is opened, some at the first write


class SpoolFile:
    """An open file that has no name. Closing gives its space back at once, also while a forked child still has it open.

    Attributes:
        fd: file descriptor.
        direct: whether reads and writes go round the page cache.
    """

    def __init__(self, fd: int, *, direct: bool) -> None:
        self.fd = fd
        self.direct = direct
        self._pid = os.getpid()

    def forget_cached(self, offset: int, count: int, *, written: bool) -> None:
        """Takes these bytes out of the page cache, where they went there at all; what was just written is brought to the disk first."""
        if self.direct:
            return
        if written:
            os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the file once; a forked child leaves its parent's file alone."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and os.getpid() == self._pid:
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def open_spool(directory: Path, *, allow_memory_filesystem: bool = False) -> SpoolFile:
    """Opens a new nameless file of mode 0600 in ``directory``.

    Raises:
        OffloadError: the directory is none, cannot be written, or lies in memory and that is not allowed.
    """
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "preadv"):
        raise OffloadError("offload to disk needs Linux; offload to the host or recompute instead")
    if not directory.is_dir():
        raise OffloadError(f"{directory} is no directory; give an existing one on a disk for activations to wait in")
    kind = filesystem_of(directory)
    if kind in _IN_MEMORY and not allow_memory_filesystem:
        raise OffloadError(
            f"{directory} is on {kind}, which is memory: moving activations there frees none. Give a directory on a disk "
            "(allow_memory_filesystem=True takes this one all the same)"
        )
    try:
        return _opened(directory)
    except OSError as problem:
        raise OffloadError(
            f"cannot make a file in {directory}: {problem.strerror or problem}; give a directory that can be written"
        ) from None


def filesystem_of(directory: Path) -> str:
    """Kind of the filesystem, as the kernel names it; '' where it does not say."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no /proc, as in some sandboxes: then nothing is known
        return ""
    for line in lines:
        fields = line.split(" ")
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""


def free_bytes(fd: int) -> int:
    """Bytes that this user may still write to the filesystem of the file."""
    there = os.fstatvfs(fd)
    return there.f_bavail * there.f_frsize


def _opened(directory: Path) -> SpoolFile:
    direct_flag = getattr(os, "O_DIRECT", 0)
    if direct_flag:
        try:
            file = SpoolFile(_nameless(directory, direct_flag), direct=True)
            _try_block(file.fd)
            return file
        except OSError as problem:
            if problem.errno not in _NO_DIRECT:
                raise
    return SpoolFile(_nameless(directory, 0), direct=False)


def _nameless(directory: Path, direct_flag: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | direct_flag
    nameless_flag = getattr(os, "O_TMPFILE", 0)
    if nameless_flag:
        try:
            return os.open(directory, flags | nameless_flag, 0o600)
        except OSError as problem:
            if problem.errno not in _NO_TMPFILE:
                raise
    named_fd, name = tempfile.mkstemp(prefix=".recoup-", dir=directory)
    try:
        return os.open(name, flags) if direct_flag else os.dup(named_fd)
    finally:
        os.unlink(name)
        os.close(named_fd)


def _try_block(fd: int) -> None:
    buffer = PageBuffer(BLOCK)
    if os.pwritev(fd, [buffer.view], 0) != BLOCK or os.preadv(fd, [buffer.view], 0) != BLOCK:
        raise OSError(errno.EINVAL, "direct access moves no whole block")
    os.ftruncate(fd, 0)
