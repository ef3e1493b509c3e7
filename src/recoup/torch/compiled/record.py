"""``record`` for a compiled model: the real step with every compiled graph split so that all is kept, written down and priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import torch

from recoup.errors import CaptureError
from recoup.graph import StepGraph
from recoup.graph.peak import corrected
from recoup.graph.rules import check
from recoup.torch.blocks import blocks_of
from recoup.torch.compiled.detect import original
from recoup.torch.compiled.interfaces import graph_breaks
from recoup.torch.compiled.joint import Joint
from recoup.torch.compiled.pricing import priced
from recoup.torch.compiled.session import Label, Local, Logged, Piece
from recoup.torch.compiled.step import Call, combined
from recoup.torch.compiled.switch import session_for
from recoup.torch.environment import environment
from recoup.torch.meter import device_of, measure_peak, resident_bytes
from recoup.torch.state import Snapshot, reachable
from recoup.torch.timing import synchronizer, time_step

__all__ = ["KeepAll", "calls_of", "record_compiled"]

Progress = Callable[[int, int, str], None]
_TOTAL = 5


class KeepAll:
    """Recomputes nothing, looks at every joint graph, and remembers the calls of one step when asked to."""

    looks = True

    def __init__(self) -> None:
        self.calls: list[Logged] = []
        # For each call and result whether it outlives the backward: then the user holds it. None before a backward is over.
        self.held: list[tuple[bool, ...]] | None = None

    def decisions(self, piece: Piece, label: Label) -> Local:
        """Nothing, whatever the graph."""
        return frozenset()

    def choose(self, piece: Piece, label: Label, joint: Joint) -> Local:
        """Nothing."""
        return frozenset()

    def key(self, piece: Piece, label: Label) -> bytes:
        """The same for all."""
        return b"recoup keeps all"

    def step_begins(self) -> None:
        """Nothing to do."""

    def before(self, piece: Piece, label: Label) -> None:
        """Nothing to do."""

    def after(self, call: Logged) -> None:
        """Remembers the call."""
        self.calls.append(call)

    def backward_ends(self) -> None:
        """Looks which results are still there."""
        self.held = [tuple(alive is None or alive() is not None for alive in call.alive) for call in self.calls]


def record_compiled(step: Callable[[], object], model: torch.nn.Module, *, name: str, progress: Progress) -> StepGraph:
    """Compile the step anew with all kept, run it, and write down its joint graphs as one step.

    The step runs eight times or so; its state is put back.

    Raises:
        CaptureError: no compiled graph of the step has a backward pass.
    """
    device = device_of(model)
    with ExitStack() as stack:
        snapshot = stack.enter_context(Snapshot.take(model, step))
        keeping = KeepAll()
        session = stack.enter_context(session_for(model, keeping))
        progress(0, _TOTAL, "compiling with all kept")
        with graph_breaks() as reasons:
            step()
        snapshot.restore()
        progress(1, _TOTAL, "running the step")
        session.logging = True
        step()
        session.logging = False
        snapshot.restore()
        standing_bytes = resident_bytes(model, *reachable(step), device=device)
        progress(2, _TOTAL, "measuring the peak")
        measured_bytes = measure_peak(step, model)
        snapshot.restore()
        progress(3, _TOTAL, "timing the step")
        step_seconds = time_step(step, repeats=5, warmup=1, synchronize=synchronizer(device))
        snapshot.restore()
    progress(4, _TOTAL, "pricing operations")
    calls = calls_of(keeping.calls, keeping.held)
    if not calls:
        raise CaptureError(
            "no compiled graph of the step has a backward pass: there is nothing to plan. Is the model compiled, and in training mode?"
        )
    whole = combined(calls, standing_bytes=standing_bytes, name=name)
    whole = msgspec.structs.replace(
        whole,
        device=str(device),
        environment=environment(device) | {"compiled graphs": str(len(calls)), "graph breaks": "; ".join(reasons)},
        blocks=blocks_of(original(model), [op.module for op in whole.ops if op.phase == "forward"]),
        measured_peak_bytes=measured_bytes,
        step_seconds=step_seconds,
    )
    graph = corrected(whole)
    check(graph)
    return graph


def calls_of(calls: Sequence[Logged], held: Sequence[tuple[bool, ...]] | None = None) -> list[Call]:
    """The logged calls that have a joint graph, each graph priced once; ``held`` says of all results whether the user keeps them."""
    known: dict[Piece, Joint] = {}
    found = []
    for number, call in enumerate(calls):
        if call.piece.joint is None:
            continue
        if call.piece not in known:
            known[call.piece] = priced(call.piece.joint)
        kept = held[number] if held is not None else ()
        found.append(Call(known[call.piece], call.label.prefix, call.label.turn, call.inputs, call.outputs, kept))
    return found
