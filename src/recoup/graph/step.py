"""The step graph: what one recorded training step did, in operations and storages.

The unit of memory is the *storage* (an alias group), never the tensor: a view is metadata on a storage. All of
it is frozen data; ``recoup.graph.rules`` is the executable specification, ``recoup.graph.text`` the printed form
and ``recoup.graph.store`` the JSON form.

Time is counted in operations. Operation ``i`` runs between gap ``i`` and gap ``i + 1``; what "happens at gap t"
happens after operation ``t - 1`` and before operation ``t``. A storage is alive during operation ``i`` if and only
if ``born <= i < dies``; ``born`` is the operation that allocates it, or -1 for what stood before the step.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal

import msgspec

from recoup.graph.tiles import TileRegion

__all__ = ["Kind", "Op", "Phase", "Ref", "Save", "StepGraph", "Storage", "View"]

Kind = Literal["activation", "parameter", "buffer", "gradient", "input", "outside"]
Phase = Literal["forward", "backward", "optimizer"]
Provenance = Literal["measured", "modelled", "assumed"]


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a tensor lies on its storage: sizes and strides in elements, offset in elements, dtype by name."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as an operation meets it: a view on one version of a storage.

    ``version`` counts the writes after creation that had happened: 0 is what the producer left.
    """

    storage: int
    version: int
    view: View


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operation of the step.

    Attributes:
        id: place in ``StepGraph.ops``.
        site: the name that lasts, ``module.path/op#n`` (``recoup.graph.site``).
        target: what ran, such as ``aten.addmm.default``.
        inputs: tensors read, in argument order (a written argument is listed too).
        constants: the other arguments, printed.
        outputs: tensors returned; those on fresh storages have this operation as their ``producer``.
        mutates: storages written in place.
        seconds: time of the operation alone.
        flops: floating point operations, 0 if unknown.
        scratch_bytes: memory above inputs and outputs that stood at the worst moment inside the operation.
        flags: any of ``random``, ``effect``, ``collective``, ``decision``, ``uninitialised``, ``opaque``, ``sync``.
        module: path of the innermost module that was running, '' for the root.
        call: how many calls of that module came before this one in the step.
        phase: forward, backward or optimizer.
        provenance: where ``seconds`` comes from.
    """

    id: int
    site: str
    target: str
    inputs: tuple[Ref, ...] = ()
    constants: tuple[str, ...] = ()
    outputs: tuple[Ref, ...] = ()
    mutates: tuple[int, ...] = ()
    seconds: float = 0.0
    flops: int = 0
    scratch_bytes: int = 0
    flags: tuple[str, ...] = ()
    module: str = ""
    call: int = 0
    phase: Phase = "forward"
    provenance: Provenance = "measured"


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One piece of memory.

    Attributes:
        id: place in ``StepGraph.storages``.
        bytes: its size.
        kind: activation, parameter, buffer, gradient, input or outside (stood before the step, none of the others).
        site: for an activation ``module.path/op#n`` or ``module.path/op#n:output``; else the parameter's or buffer's name, or ''.
        producer: the operation that allocated it, or None.
        writes: operations that wrote it in place after that, in order; write ``k`` makes version ``k + 1``.
        born: the operation that allocated it, -1 if it stood before the step.
        dies: the gap at which it was freed in the recorded step; ``len(ops)`` if it outlived it.
        unheld_dies: the gap at which it would have been freed if no saved tensor had held it (``<= dies``).
        replayable: '' if the executor can rebuild it bit for bit, else the reason why not. Only activations of the
            forward phase have ''.
        movable: '' if executors may send it away and fetch it back, as far as the front-end can tell; else the reason why not.
    """

    id: int
    bytes: int
    kind: Kind
    site: str = ""
    producer: int | None = None
    writes: tuple[int, ...] = ()
    born: int = -1
    dies: int = 0
    unheld_dies: int = 0
    replayable: str = "not an activation of the forward"
    movable: str = ""


class Save(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor that autograd packed for the backward pass.

    Attributes:
        ref: which version of which storage, seen how.
        packed_at: the gap at which it was packed.
        unpacked_at: the gaps at which the backward unpacked it, in order; empty if it never did.
        released_at: the gap at which autograd let go of it.
    """

    ref: Ref
    packed_at: int
    unpacked_at: tuple[int, ...]
    released_at: int


class StepGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """One recorded step.

    Attributes:
        ops: operations in the order in which they ran.
        storages: every storage that an operation touched, or that stood before the step and belongs to it.
        saves: what autograd packed, in packing order.
        unpack_order: indices into ``saves``, in the order in which the backward unpacked them.
        backwards: the gaps at which a backward pass began (several with ``retain_graph`` or gradient accumulation).
        name: what the step is called in reports.
        frontend: ``torch-eager`` and so on.
        device: the device the step ran on, such as ``cpu``.
        environment: versions and settings that costs depend on.
        signature: shapes and dtypes of the model's inputs, as text.
        step_seconds: median time of the unrecorded step.
        measured_peak_bytes: the peak that the allocator saw, resident bytes included; None if not measured.
        blocks: module paths of the repeated blocks, in order (what "every block" means).
        root_calls: how many outermost calls of the model's modules the step makes.
        tileable: calls that were looked at for running in tiles, with what became of it; empty if nobody looked.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...] = ()
    unpack_order: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()
    name: str = "step"
    frontend: str = "torch-eager"
    device: str = "cpu"
    environment: dict[str, str] = {}
    signature: str = ""
    step_seconds: float = 0.0
    measured_peak_bytes: int | None = None
    blocks: tuple[str, ...] = ()
    root_calls: int = 1
    tileable: tuple[TileRegion, ...] = ()

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that stood before the step: weights, buffers, standing gradients, optimizer state, inputs."""
        return sum(storage.bytes for storage in self.storages if storage.born < 0)

    @cached_property
    def forward_end(self) -> int:
        """The first gap of the backward phase (``len(ops)`` if there is none)."""
        return next((op.id for op in self.ops if op.phase == "backward"), len(self.ops))

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits over structure alone: operations, their wiring, sizes, saves; never times or names of devices."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(f"{op.site}|{op.target}|{op.phase}|{op.mutates}|".encode())
            digest.update(";".join(f"{ref.storage}.{ref.version}" for ref in (*op.inputs, *op.outputs)).encode())
        for storage in self.storages:
            digest.update(f"{storage.bytes}|{storage.kind}|{storage.producer}|{storage.writes}".encode())
        for save in self.saves:
            digest.update(f"{save.ref.storage}.{save.ref.version}|{save.packed_at}".encode())
        return digest.hexdigest()[:16]
