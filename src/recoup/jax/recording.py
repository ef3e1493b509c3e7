"""A recorded step as data: the graph of the step, and one for the body of each planned loop. No JAX, no arrays.

A loop is one operation in the forward and one in the backward of the region around it. What they take and hold hangs on
how its body is planned, so in a recorded graph they stand with nothing; ``recoup.jax.figures`` fills them in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from os import PathLike

import msgspec

from recoup.graph import StepGraph
from recoup.graph.store import decode_versioned, read_file, write_file

__all__ = ["Body", "Recording", "load", "save"]

FORMAT = 1


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body of a planned loop.

    Attributes:
        name: module path of the loop; its two operations in the region around it have this module.
        turns: how often the body runs.
        carry_bytes: all that is carried from turn to turn.
        outside_bytes: what the body reads that is there but once for all turns, its resident bytes beside the slices.
        graph: one turn, forward and backward.
        loops: loops within the body.
    """

    name: str
    turns: int
    carry_bytes: int
    outside_bytes: int
    graph: StepGraph
    loops: tuple[Body, ...] = ()


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A recorded step of JAX.

    Attributes:
        graph: the step; resident bytes are the arguments.
        loops: planned loops in it.
        names: for each tag of ``checkpoint_name`` the sites of the storages that carry it.
        unplanned_residual_bytes: what JAX by itself keeps from the forward for the backward, arguments aside.
        devices: over how many devices the arguments are laid; bytes are those of all devices together.
    """

    graph: StepGraph
    loops: tuple[Body, ...] = ()
    names: dict[str, tuple[str, ...]] = {}
    unplanned_residual_bytes: int = 0
    devices: int = 1

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits over the structure of all regions."""
        parts = [
            self.graph.fingerprint,
            *(f"{body.name}|{body.turns}|{body.carry_bytes}|{body.graph.fingerprint}" for body in self.bodies()),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def bodies(self) -> Iterator[Body]:
        """All loops' bodies, outer ones first."""
        stack = list(self.loops)
        while stack:
            body = stack.pop(0)
            yield body
            stack.extend(body.loops)

    @property
    def operations(self) -> int:
        """Operations of all regions."""
        return len(self.graph.ops) + sum(len(body.graph.ops) for body in self.bodies())


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    recording: Recording


def save(recording: Recording, path: str | PathLike[str]) -> None:
    """Writes a recording as JSON, zipped if the name ends with ``.gz``.

    Raises:
        UsageError: the file cannot be written.
    """
    write_file(path, msgspec.json.encode(_Envelope(FORMAT, recording)))


def load(path: str | PathLike[str]) -> Recording:
    """Reads a recording that ``save`` wrote.

    Raises:
        UsageError: the file is not there or cannot be read.
        PlanMismatch: it is no recording; the path of the field is in the message.
    """
    return decode_versioned(read_file(path), _Envelope, FORMAT, "recording of a JAX step", path).recording
