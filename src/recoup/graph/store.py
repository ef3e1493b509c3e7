"""Step graphs as files: JSON with a format version, gzipped if the name ends with ``.gz``; no pickles.

Files are written whole or not at all. Unknown fields are refused, with their path.
"""

from __future__ import annotations

import gzip
import os
import secrets
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from recoup.errors import PlanMismatch, UsageError
from recoup.graph.step import StepGraph

__all__ = ["FORMAT", "decode_versioned", "load", "read_file", "save", "write_file"]

FORMAT = 1
Decoded = TypeVar("Decoded")


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    graph: StepGraph


class _Version(msgspec.Struct, frozen=True):
    format: int


def save(graph: StepGraph, path: str | os.PathLike[str]) -> None:
    """Writes the graph to a file.

    Raises:
        UsageError: the file cannot be written.
    """
    write_file(path, msgspec.json.encode(_Envelope(FORMAT, graph)))


def load(path: str | os.PathLike[str]) -> StepGraph:
    """Reads a graph that ``save`` wrote.

    Raises:
        UsageError: the file is not there or cannot be read.
        PlanMismatch: it is cut short, of another format version, or has a field that is wrong or unknown; the path
            of the field is in the message.
    """
    return decode_versioned(read_file(path), _Envelope, FORMAT, "step graph", path).graph


def decode_versioned(data: bytes, kind: type[Decoded], version: int, what: str, path: str | os.PathLike[str]) -> Decoded:
    """JSON of a known format version as ``kind``; the version is asked first, so that a newer file is named as such.

    Raises:
        PlanMismatch: the data is no such file.
    """
    name = os.fspath(path)
    try:
        found = msgspec.json.decode(data, type=_Version).format
        if found != version:
            raise PlanMismatch(f"{name}: {what} format {found}, but this version of Recoup reads format {version}; write the file anew")
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise PlanMismatch(f"{name} is no {what}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanMismatch(f"{name} is no {what}, or cut short: {error}") from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, unzipped if its name ends with ``.gz``.

    Raises:
        UsageError: the file is not there or cannot be read.
        PlanMismatch: the compressed data is damaged.
    """
    name = os.fspath(path)
    try:
        data = Path(name).read_bytes()
        return gzip.decompress(data) if name.endswith(".gz") else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PlanMismatch(f"{name} is damaged or cut short: {error}") from error
    except FileNotFoundError as error:
        raise UsageError(f"no file {name}") from error
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all, zipped if its name ends with ``.gz``; the same data gives the same bytes.

    Raises:
        UsageError: the file cannot be written.
    """
    target = Path(path)
    if target.name.endswith(".gz"):
        data = gzip.compress(data, compresslevel=6, mtime=0)
    # In the same folder, since a rename is atomic within one file system only.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
