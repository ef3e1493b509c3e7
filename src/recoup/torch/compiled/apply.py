"""Running a plan on a compiled model: every graph is compiled anew, split as the plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import recoup
from recoup.errors import PlanMismatch
from recoup.graph.site import expand
from recoup.plan import Plan
from recoup.torch.compiled.joint import Joint
from recoup.torch.compiled.record import KeepAll
from recoup.torch.compiled.session import AWAY, Label, Local, Logged, Piece
from recoup.torch.compiled.sites import decisions_of
from recoup.torch.compiled.step import site_in
from recoup.torch.compiled.switch import session_for
from recoup.torch.compiled.transfers import begin_call
from recoup.torch.meter import device_of
from recoup.torch.offload.inbox import Inbox
from recoup.torch.offload.opening import open_outbox
from recoup.torch.offload.outbox import Outbox, Tally
from recoup.torch.offload.store import Store
from recoup.torch.report import Report

__all__ = ["AppliedCompiled", "Planned", "side_by_side"]


class Planned:
    """Decides by a plan, and sees to it that all of the plan finds its place.

    Args:
        plan: what is decided.
        outbox: where offloaded storages go; None for a plan that offloads nothing.
    """

    looks = False

    def __init__(self, plan: Plan, outbox: Outbox | None = None) -> None:
        self.plan = plan
        self.outbox = outbox
        # The way back for the forward under way, and the calls that it has seen: what comes again is another forward.
        self.inbox: Inbox | None = None
        self._sent: set[tuple[int, Label]] = set()
        self.calls = 0
        self.dropped_bytes = 0
        self.met: set[str] = set()
        self._bytes = _bytes_by_site(plan)
        self._local: dict[Label, Local] = {}
        self._seen: set[tuple[int, Label]] = set()
        # Graphs out of PyTorch's caches were split by these decisions before, and cannot be looked into.
        self._looked_into: set[tuple[int, Label]] = set()
        self._checked = False

    def decisions(self, piece: Piece, label: Label) -> Local:
        """What the plan says for the graph's label; sites of other graphs may be among it, and find nothing there."""
        if label not in self._local:
            self._local[label] = decisions_of(self.plan, label)
        return self._local[label]

    def choose(self, piece: Piece, label: Label, joint: Joint) -> Local:
        """What the plan says, less what this joint graph does not have.

        Raises:
            PlanMismatch: the plan drops what cannot be rebuilt here, or offloads what cannot be.
        """
        storages = {storage.site: storage for storage in joint.graph.storages if storage.kind == "activation" and storage.site}
        found = frozenset(one for one in self.decisions(piece, label) if one[0] in storages)
        for site, how in found:
            if how == AWAY and storages[site].movable:
                raise PlanMismatch(f"the plan offloads {site}, which cannot be: {storages[site].movable}; record and solve again")
            if how != AWAY and storages[site].replayable:
                raise PlanMismatch(f"the plan recomputes {site}, which cannot be: {storages[site].replayable}; record and solve again")
        self.met |= {site_in(site, label.prefix, label.turn) for site, _ in found}
        self._looked_into.add((piece.number, label))
        return found

    def key(self, piece: Piece, label: Label) -> bytes:
        """A hash of the decisions for this label and of what carries them out."""
        decided = sorted(self.decisions(piece, label))
        return hashlib.sha256(f"recoup {recoup.__version__} {decided}".encode()).digest()

    def step_begins(self) -> None:
        """When a second step begins, all of the plan must have found its place.

        Raises:
            PlanMismatch: sites of the plan are nowhere in the compiled graphs of the step.
        """
        self._new_inbox()
        if self._seen and not self._checked:
            self._checked = True
            self._demand_all_met()

    def before(self, piece: Piece, label: Label) -> None:
        """Counts, and says where this call's storages go. Calls without a backward have nothing to decide."""
        if not torch.is_grad_enabled():
            return
        if self.outbox is not None:
            if self.inbox is None or (piece.number, label) in self._sent:
                self._new_inbox()
            assert self.inbox is not None
            self._sent.add((piece.number, label))
            begin_call(self.inbox, label.prefix, label.turn)
        self.calls += 1
        self.dropped_bytes += sum(self._bytes.get(site_in(site, label.prefix, label.turn), 0) for site, _ in self.decisions(piece, label))
        self._seen.add((piece.number, label))

    def after(self, call: Logged) -> None:
        """Nothing to do."""

    def backward_ends(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """No more goes out. Backward passes to come hold the store as long as they need it."""
        self.outbox = self.inbox = None

    @property
    def dropped_sites(self) -> frozenset[str]:
        """All that the plan recomputes or offloads."""
        return self.plan.recompute_sites | self.plan.offload_sites

    def _new_inbox(self) -> None:
        traffic = self.plan.traffic
        if self.outbox is not None and traffic is not None:
            self.inbox = Inbox(self.outbox, traffic.read_window_bytes, self.plan.offload_sites)
            self._sent.clear()

    def _demand_all_met(self) -> None:
        missing = sorted(self.dropped_sites - self.met)
        if missing and self._seen <= self._looked_into:
            does = "offloads" if missing[0] in self.plan.offload_sites else "recomputes"
            raise PlanMismatch(
                f"the plan {does} {missing[0]}, which no compiled graph of this step has ({len(missing)} of"
                f" {len(self.dropped_sites)} sites are missing); the plan was made for another model, other sizes or another"
                " version of PyTorch: record and solve again"
            )


@contextmanager
def side_by_side(
    model: torch.nn.Module, plan: Plan, offload_to: str | Path | Store | None = None
) -> Generator[Callable[[bool], AbstractContextManager[object]]]:
    """A way to run a compiled model by turns with the plan and with all kept, each compiled once.

    Each turn gives what runs the plan, or None.

    Raises:
        PlanMismatch: the plan is not for a compiled model.
        OffloadError: the plan offloads, and the place cannot be used or has too little space.
    """
    demand_compiled(plan)
    kept, planned = KeepAll(), Planned(plan, open_outbox(plan, device_of(model), offload_to, Tally()))
    with session_for(model, kept) as session:

        def turn(with_plan: bool) -> AbstractContextManager[object]:
            session.use(planned if with_plan else kept)
            return nullcontext(planned if with_plan else None)

        try:
            yield turn
        finally:
            planned.close()


def demand_compiled(plan: Plan) -> None:
    """Passes for plans of compiled steps.

    Raises:
        PlanMismatch: the plan is for another front-end.
    """
    if plan.frontend != "torch-compile":
        raise PlanMismatch(
            f"this plan was made for {plan.frontend}, but the model is compiled, where operations differ: record the compiled step and"
            " solve again"
        )


class AppliedCompiled:
    """A plan at work on a compiled model. Remove it with ``remove()``, or use it as a context manager."""

    def __init__(
        self, model: torch.nn.Module, plan: Plan, forget: Callable[[], None], offload_to: str | Path | Store | None = None
    ) -> None:
        demand_compiled(plan)
        self.model = model
        self.plan = plan
        self.gear = "compiled"
        self._tally = Tally()
        self._planned = Planned(plan, open_outbox(plan, device_of(model), offload_to, self._tally))
        self._stack = ExitStack()
        self._stack.callback(forget)
        self._stack.callback(self._planned.close)
        self._stack.enter_context(session_for(model, self._planned))

    def report(self) -> Report:
        """What the plan has done so far."""
        planned, moved = self._planned, self._tally
        return Report(
            gear="compiled",
            static_calls=planned.calls,
            dropped_bytes=planned.dropped_bytes,
            offloaded_bytes=moved.put_bytes,
            fetched_bytes=moved.fetched_bytes,
            waited_seconds=moved.waited_seconds,
            sites_expected=len(planned.dropped_sites),
            sites_met=len(planned.met),
            kept=dict(moved.stayed),
        )

    def remove(self) -> None:
        """Give the model back as it was; its graphs are compiled anew when it is called next."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def _bytes_by_site(plan: Plan) -> Mapping[str, int]:
    found: dict[str, Any] = {}
    for decision in plan.decisions:
        sites = expand(decision.site)
        found |= dict.fromkeys(sites, decision.bytes // len(sites))
    return found
