"""``record``: a real step, run a few times, written down as a priced and audited step graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from recoup.errors import CaptureError, UsageError
from recoup.graph import Op, Save, StepGraph, Storage
from recoup.graph.peak import corrected
from recoup.graph.rules import check
from recoup.torch.apply import refuse_planned
from recoup.torch.audit import probe_operations, rebuild_everything
from recoup.torch.blocks import blocks_of
from recoup.torch.compiled.detect import is_compiled
from recoup.torch.environment import environment
from recoup.torch.frames import OUTSIDE
from recoup.torch.meter import device_of, measure_peak, profile_operations
from recoup.torch.recorder import RecordedStorage, Recorder
from recoup.torch.state import Snapshot
from recoup.torch.tile.find import find_regions
from recoup.torch.timing import clock_for, synchronizer, time_step

if TYPE_CHECKING:
    from recoup.torch.recorder import RecordedOp

__all__ = ["record"]

Progress = Callable[[int, int, str], None]


def record(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    runs: int = 3,
    name: str = "step",
    progress: Progress | None = None,
) -> StepGraph:
    """Run a training step several times and write down what it does, what it costs and what of it may be rebuilt.

    The step runs ``runs + 12`` times or so. Everything that Recoup can find of its state (parameters, buffers, gradients,
    optimizers, generators, plain attributes of modules) is put back after each run and at the end.

    Args:
        step: one forward and backward pass, with whatever else belongs to it, without arguments.
        model: the module whose calls make the forward.
        runs: timed passes; an operation's seconds are the least of them.
        name: what reports call the step.
        progress: called with passes done, passes in all, and what is going on.

    Raises:
        CaptureError: the step runs no backward, makes no call of the model, or cannot be recorded.
        UsageError: ``model`` is no module, ``step`` cannot be called, or ``runs`` is below one.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"record needs the model as a torch.nn.Module, not a {type(model).__name__}")
    if not callable(step) or runs < 1:
        raise UsageError("record needs a step that can be called without arguments, and at least one run")
    refuse_planned(model)
    tell = progress or (lambda done, total, text: None)
    if is_compiled(model):
        from recoup.torch.compiled.record import record_compiled  # loads the compiler's private parts, which eager models do without

        return record_compiled(step, model, name=name, progress=tell)
    return _Recording(step, model, runs, tell).graph(name)


class _Recording:
    """The passes over one step and what they found."""

    def __init__(self, step: Callable[[], object], model: torch.nn.Module, runs: int, progress: Progress) -> None:
        self.step = step
        self.model = model
        self.runs = runs
        self.progress = progress
        self.device = device_of(model)
        self.total = runs + 5
        self.done = 0

    def graph(self, name: str) -> StepGraph:
        with Snapshot.take(self.model, self.step) as snapshot:
            self._tell("running the step")
            step_seconds = time_step(self.step, repeats=3, warmup=1, synchronize=synchronizer(self.device))
            snapshot.restore()
            passes = [self._pass("recording", snapshot) for _ in range(self.runs)]
            main = passes[0]
            _demand_backward(main)
            scratch = self._scratch(snapshot, main)
            self._tell("auditing: every operation runs twice")
            refused = probe_operations(self.step, self.model)
            snapshot.restore()
            unheld = self._unheld(refused, main, snapshot)
            self._tell("measuring the peak")
            measured_bytes = measure_peak(self.step, self.model)
            snapshot.restore()
            self._tell("looking for token-wise regions")
            tileable = find_regions(self.step, self.model, main, self.device, snapshot, measured_bytes)
        seconds = _least_seconds(main, passes)
        reasons = Reasons(main, passes, refused)
        graph = StepGraph(
            ops=tuple(_op(number, op, seconds[number], scratch[number]) for number, op in enumerate(main.ops)),
            storages=tuple(_storage(storage, reasons.of(storage), unheld) for storage in main.storages),
            saves=tuple(
                Save(ref=save.ref, packed_at=save.packed_at, unpacked_at=tuple(save.unpacked_at), released_at=save.released_at)
                for save in main.saves
            ),
            unpack_order=tuple(main.unpack_order),
            backwards=tuple(main.backwards),
            name=name,
            device=str(self.device),
            environment=environment(self.device),
            signature=main.signature,
            step_seconds=step_seconds,
            measured_peak_bytes=measured_bytes,
            blocks=blocks_of(self.model, [op.module for op in main.ops if op.phase == "forward"]),
            root_calls=max(main.roots, 1),
            tileable=tileable,
        )
        graph = corrected(graph)
        check(graph)
        return graph

    def _tell(self, text: str) -> None:
        self.progress(self.done, self.total, text)
        self.done += 1

    def _pass(self, text: str, snapshot: Snapshot) -> Recorder:
        self._tell(text)
        recorder = Recorder(self.model, clock_for(self.device))
        recorder.record(self.step)
        snapshot.restore()
        return recorder

    def _scratch(self, snapshot: Snapshot, main: Recorder) -> list[int]:
        """Bytes above its outputs that each operation needs while it runs."""
        self._tell("measuring scratch memory")
        recorder = Recorder(self.model, clock_for(self.device), marking=True)
        highs = profile_operations(lambda: recorder.record(self.step))
        snapshot.restore()
        made = [0] * len(recorder.ops)
        for storage in recorder.storages:
            if storage.producer is not None:
                made[storage.producer] += storage.bytes
        place = aligned(main, recorder)
        return [max(highs.get(place[number], 0) - made[place[number]], 0) if number in place else 0 for number in range(len(main.ops))]

    def _dropping(self, refused: dict[str, str], snapshot: Snapshot) -> tuple[Recorder, int]:
        """A recording of the step with all dropped that is not refused, and how many passes it holds."""
        recorder = Recorder(self.model, clock_for(self.device), saving=False)
        counts: list[int] = []
        recorder.record(lambda: counts.append(rebuild_everything(self.step, self.model, refused, snapshot.restore)))
        snapshot.restore()
        return recorder, counts[0]

    def _unheld(self, refused: dict[str, str], main: Recorder, snapshot: Snapshot) -> dict[str, int]:
        """Rebuild everything; for each activation that may be rebuilt, the gap at which it dies if nothing holds it for the backward.

        What does not come back right is added to ``refused``, and the pass is recorded anew without it.
        """
        self._tell("auditing: everything is dropped and rebuilt")
        recorder, passes = self._dropping(refused, snapshot)
        while passes > 1:
            recorder, passes = self._dropping(refused, snapshot)
        back = {number: here for here, number in aligned(main, recorder).items()}
        deaths: dict[str, int] = {}
        for storage in recorder.storages:
            # It died after its last operation that both passes have; a gap is one behind the operation before it.
            before = next((back[number] for number in range(storage.dies - 1, -1, -1) if number in back), None)
            if storage.site and before is not None:
                deaths[storage.site] = before + 1
        return deaths


class Reasons:
    """Why a storage may not be rebuilt, from the audit and from the wiring."""

    def __init__(self, main: Recorder, passes: list[Recorder], refused: dict[str, str]) -> None:
        self.main = main
        self.refused = refused
        self.steady = set.intersection(*({op.site + op.target for op in one.ops} for one in passes))
        self.by_storage: dict[int, str] = {}
        last_backward = max((number for number, op in enumerate(main.ops) if op.phase == "backward"), default=-1)
        self._saves()
        self._reads(last_backward)

    def of(self, storage: RecordedStorage) -> str:
        """The reason, '' if it may be rebuilt."""
        ops = self.main.ops
        if storage.kind != "activation" or storage.producer is None:
            return "not an activation of the forward"
        producer = ops[storage.producer]
        if producer.module == OUTSIDE or not producer.root:
            return "made outside of the model's modules"
        if storage.bytes == 0:
            return "it has no bytes"
        makers = [producer, *(ops[write] for write in storage.writes)]
        for op in makers:
            if op.phase != "forward" or op.module == OUTSIDE or op.root != producer.root:
                return f"written by {op.site}, outside of the call that made it"
            if op.site + op.target not in self.steady:
                return f"{op.site} does not run in every pass"
        found = self.refused.get(storage.site) or self.refused.get(producer.site) or self.by_storage.get(storage.id, "")
        return found or next((self.refused[op.site] for op in makers if op.site in self.refused), "")

    def _saves(self) -> None:
        for save in self.main.saves:
            storage = self.main.storages[save.ref.storage]
            if storage.producer is None:
                continue
            if save.root != self.main.ops[storage.producer].root:
                self.by_storage.setdefault(storage.id, "saved outside of the outermost module call that made it")
            if save.ref.version != len(storage.writes):
                self.by_storage.setdefault(storage.id, "written in place after it was saved")

    def _reads(self, last_backward: int) -> None:
        """What reads a version that is overwritten before the backward is done cannot be rebuilt from it; nor can what was overwritten."""
        makers: dict[int, list[int]] = {}
        for storage in self.main.storages:
            for number in () if storage.producer is None else (storage.producer, *storage.writes):
                makers.setdefault(number, []).append(storage.id)
        for number, op in enumerate(self.main.ops):
            if op.phase != "forward":
                continue
            made = makers.get(number, [])
            for ref in op.inputs:
                storage = self.main.storages[ref.storage]
                overwritten = len(storage.writes) > ref.version and storage.writes[ref.version] <= last_backward
                if overwritten and storage.id not in made:
                    what = storage.site or f"a {storage.kind}"
                    for other in made:
                        self.by_storage.setdefault(other, f"{op.site} reads {what}, which is written in place later")
                    self.by_storage.setdefault(storage.id, f"{op.site} reads it before it is written in place")


def aligned(main: Recorder, other: Recorder) -> dict[int, int]:
    """For each operation of ``main`` the operation of ``other`` with the same site, where there is one."""
    places = {op.site: number for number, op in enumerate(other.ops)}
    return {number: places[op.site] for number, op in enumerate(main.ops) if op.site in places}


def _least_seconds(main: Recorder, passes: list[Recorder]) -> list[float]:
    least = main.seconds()
    for other in passes[1:]:
        seconds = other.seconds()
        for here, there in aligned(main, other).items():
            least[here] = min(least[here], seconds[there])
    return least


def _op(number: int, op: RecordedOp, seconds: float, scratch_bytes: int) -> Op:
    return Op(
        id=number,
        site=op.site,
        target=op.target,
        inputs=op.inputs,
        constants=op.constants,
        outputs=op.outputs,
        mutates=op.mutates,
        seconds=seconds,
        flops=op.flops,
        scratch_bytes=scratch_bytes,
        flags=op.flags,
        module=op.module,
        call=op.call,
        phase=op.phase,
    )


def _storage(storage: RecordedStorage, reason: str, unheld: dict[str, int]) -> Storage:
    dies = storage.dies
    return Storage(
        id=storage.id,
        bytes=storage.bytes,
        kind=storage.kind,
        site=storage.site,
        producer=storage.producer,
        writes=tuple(storage.writes),
        born=storage.born,
        dies=dies,
        unheld_dies=min(dies, unheld.get(storage.site, dies)) if not reason else dies,
        replayable=reason,
    )


def _demand_backward(main: Recorder) -> None:
    if not main.roots:
        raise CaptureError("the step never called the model; pass the module whose calls make the forward pass as model=")
    if not main.backwards:
        raise CaptureError(
            "the step ran no backward pass: nothing is kept for one, so there is nothing to plan. Call loss.backward() inside the step."
        )
