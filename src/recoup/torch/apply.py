"""Applying a plan to an unmodified model, and taking it off again without a trace."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import torch

from recoup.errors import PlanMismatch, UsageError
from recoup.plan import Plan
from recoup.torch.compiled.detect import is_compiled
from recoup.torch.interception import Interception
from recoup.torch.live import LiveSession, outer_recomputes
from recoup.torch.naming import tensor_names
from recoup.torch.offload.inbox import Inbox
from recoup.torch.offload.opening import open_outbox
from recoup.torch.offload.outbox import Outbox, Tally
from recoup.torch.offload.store import Store
from recoup.torch.planned import PlannedPolicy, SiteTable
from recoup.torch.private import below_backward, is_faking
from recoup.torch.promotion import CallState, Promotion
from recoup.torch.report import Report
from recoup.torch.signature import signature_of
from recoup.torch.tile.tiler import Tiler

if TYPE_CHECKING:
    from recoup.torch.compiled.apply import AppliedCompiled

__all__ = ["Applied", "Report", "apply", "refuse_planned"]

NewShape = Literal["reuse", "keep", "raise"]


_planned: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def refuse_planned(model: torch.nn.Module) -> None:
    """Recording, verifying or planning a model that runs a plan would take the planned step for the plain one.

    Raises:
        UsageError: a plan is applied to the model.
    """
    if model in _planned:
        raise UsageError(f"a plan is applied to this {type(model).__name__} already; call remove() on it first")


class _Thread(threading.local):
    """Per thread: the call under way, and how often each module was called in the step under way."""

    def __init__(self) -> None:
        self.call: _LiveCall | None = None
        self.busy = False
        self.roots = 0
        self.calls: Counter[str] = Counter()
        # Of the outermost call under way: its tiled modules; whether a tiled call runs, and which modules it has called so far.
        self.tiler: Tiler | None = None
        self.apart = False
        self.inside: set[str] | None = None


class Applied:
    """A plan at work on a model. Remove it with ``remove()``, or use it as a context manager.

    While it is applied, the model's ``state_dict``, names, classes, hooks, copies and pickles are what they were.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        gear: str | None = None,
        new_shape: NewShape = "reuse",
        audit_every: int = 100,
        offload_to: str | Path | Store | None = None,
    ) -> None:
        if new_shape not in ("reuse", "keep", "raise"):
            raise UsageError(f"new_shape is 'reuse', 'keep' or 'raise', not {new_shape!r}")
        if (gear or plan.gear) not in ("live", "static"):
            raise UsageError(f"gear is 'live' or 'static', not {gear!r}")
        self.model = model
        self.plan = plan
        self.gear = gear or plan.gear
        self.new_shape: NewShape = new_shape
        self._tables = {plan.signature: SiteTable(plan, model)}
        self._plans = {plan.signature: plan}
        self._tilers = {plan.signature: Tiler(model, plan.tiles_by_module, self._apart)}
        self._names = tensor_names([model])
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, str] = {}
        self._shapes: dict[str, None] = {}
        self._promotion = Promotion(model, audit_every) if self.gear == "static" else None
        self._interception: Interception | None = None
        refuse_planned(model)
        self._offload_to = offload_to
        self._outbox: Outbox | None = None
        self._tally = Tally()
        self._open_outbox(plan)
        self._install(plan)

    def _install(self, plan: Plan) -> None:
        if self._interception is None and not plan.drops_nothing:
            self._interception = Interception(self.model, self._around)
            _planned[self.model] = True

    def _open_outbox(self, plan: Plan) -> None:
        if self._outbox is None:
            device = next((tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))
            self._outbox = open_outbox(plan, device, self._offload_to, self._tally)

    def _inbox(self, plan: Plan) -> Inbox | None:
        traffic = plan.traffic
        if self._outbox is None or traffic is None or not plan.offload_sites:
            return None
        return Inbox(self._outbox, traffic.read_window_bytes, plan.offload_sites)

    # -- plans

    def add_plan(self, plan: Plan) -> None:
        """Use this plan for the input shapes that it was made for.

        Raises:
            PlanMismatch: it is a plan for another model, or for another number of model calls in a step.
        """
        if plan.root_calls != self.plan.root_calls:
            raise PlanMismatch(
                f"the plan is for steps with {plan.root_calls} calls of the model, the one applied for {self.plan.root_calls}"
            )
        self._tables[plan.signature] = SiteTable(plan, self.model)
        self._plans[plan.signature] = plan
        self._open_outbox(plan)
        self._tilers[plan.signature] = Tiler(self.model, plan.tiles_by_module, self._apart)
        self._install(plan)

    def report(self) -> Report:
        """What has been done so far."""
        with self._lock:
            count, moved = self._counts, self._tally
            return Report(
                gear=self.gear,
                live_calls=count["live"],
                static_calls=count["static"],
                plain_calls=count["plain"],
                dropped_bytes=count["dropped_bytes"],
                copied_bytes=count["copied_bytes"],
                sites_expected=count["expected"],
                sites_met=count["met"],
                offloaded_bytes=moved.put_bytes,
                fetched_bytes=moved.fetched_bytes,
                waited_seconds=moved.waited_seconds,
                kept={
                    **self._kept,
                    **moved.stayed,
                    **{site: reason for tiler in self._tilers.values() for site, reason in tiler.kept.items()},
                },
                unplanned_shapes=tuple(self._shapes),
                static_refusals=self._promotion.refusals() if self._promotion else {},
                tiled_calls=sum(sum(tiler.calls.values()) for tiler in self._tilers.values()),
            )

    def remove(self) -> None:
        """Give the model back as it was. Backward passes of calls already made still work."""
        if self._interception is not None:
            self._interception.remove()
            self._interception = None
            _planned.pop(self.model, None)
            # Calls whose backward is still to come hold the store as long as they need it.
            self._outbox = None

    def __enter__(self) -> Self:
        """Apply the plan again if it was removed; what the static gear has learnt stays."""
        if self._interception is None:
            refuse_planned(self.model)
            for plan in self._plans.values():
                self._open_outbox(plan)
            self._install(self.plan)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    # -- calls

    def _around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        thread = self._thread
        if thread.apart:
            # A module that is also called elsewhere has the same number there as without tiles: its pieces count once.
            if thread.inside is not None and path not in thread.inside:
                thread.inside.add(path)
                thread.calls[path] += 1
            return inner(*args, **kwargs)
        if thread.tiler is not None and path in thread.tiler:
            inner = functools.partial(_in_tiles, thread.tiler, path, inner)
        if thread.call is not None:
            return thread.call.around(path, inner, args, kwargs)
        if (
            thread.busy
            or not torch.is_grad_enabled()
            or below_backward()
            or torch.compiler.is_compiling()
            or is_faking()
            or outer_recomputes()
        ):
            return inner(*args, **kwargs)
        return self._root(thread, path, inner, args, kwargs)

    def _root(
        self, thread: _Thread, path: str, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if thread.roots % max(self.plan.root_calls, 1) == 0:
            thread.calls.clear()
        number = thread.roots % max(self.plan.root_calls, 1)
        thread.roots += 1
        signature = signature_of(args, kwargs)
        table = self._table(path, number, signature)
        if table is None:
            self._counts["plain"] += 1
            thread.busy = True
            try:
                return inner(*args, **kwargs)
            finally:
                thread.busy = False
        thread.tiler = self._tilers[table.signature]
        if path in thread.tiler:
            inner = functools.partial(_in_tiles, thread.tiler, path, inner)
        try:
            return self._planned(thread, table, (path, number, signature), inner, args, kwargs)
        finally:
            thread.tiler = None

    def _planned(
        self,
        thread: _Thread,
        table: SiteTable,
        key: tuple[str, int, str],
        inner: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if self._promotion is not None:
            static = self._promotion.start(key, args, kwargs, lambda: self._inbox(table.plan))
            if static is not None:
                return self._run_static(thread, static, inner, args, kwargs)
        return self._run_live(thread, table, key, inner, args, kwargs)

    @contextmanager
    def _apart(self, counting: bool = False) -> Iterator[None]:
        """What runs inside is one operation of Recoup's own: module calls pass, and the live gear looks away."""
        thread = self._thread
        call, before = thread.call, (thread.apart, thread.inside)
        capturing = call is not None and call.capturing
        thread.apart, thread.inside = True, set() if counting else None
        if call is not None and capturing:
            call.switch(False)
        try:
            yield
        finally:
            if call is not None and capturing:
                call.switch(True)
            thread.apart, thread.inside = before

    def _table(self, path: str, number: int, signature: str) -> SiteTable | None:
        """The plan's sites for inputs of these shapes; None to run this call unplanned."""
        planned = self.plan.signature
        if path or number or not planned or signature in self._tables:
            return self._tables.get(signature, self._tables[planned])
        if self.new_shape == "raise":
            raise PlanMismatch(
                f"no plan for inputs {signature}; there are plans for {', '.join(self._tables)}. "
                "Add one with add_plan, or apply with new_shape='reuse'."
            )
        with self._lock:
            if signature not in self._shapes and len(self._shapes) < 1000:
                self._shapes[signature] = None
        return self._tables[planned] if self.new_shape == "reuse" else None

    def _run_static(
        self, thread: _Thread, static: object, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        thread.busy = True
        try:
            with static:  # type: ignore[attr-defined]
                return inner(*args, **kwargs)
        finally:
            thread.busy = False
            self._counts["static"] += 1

    def _run_live(
        self,
        thread: _Thread,
        table: SiteTable,
        key: tuple[str, int, str],
        inner: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        call = _LiveCall(table, thread.calls, self._names, self._inbox(table.plan))
        before: CallState | None = None
        if self._promotion is not None:
            call.session.packs = []
            before = self._promotion.before(args, kwargs)
        thread.call = call
        finished = False
        try:
            with call.session.hooks:
                result = call.around(key[0], inner, args, kwargs)
            finished = True
            return result
        finally:
            thread.call = None
            if finished and self._promotion is not None and before is not None:
                self._promotion.learn(key, call.session, before)
            call.session.close()
            self._count(call)

    def _count(self, call: _LiveCall) -> None:
        with self._lock:
            self._counts["live"] += 1
            self._counts["dropped_bytes"] += call.session.dropped_bytes
            self._counts["copied_bytes"] += call.session.copied_bytes
            self._counts["expected"] += call.policy.expected
            self._counts["met"] += call.policy.met
            for site, reason in call.policy.reasons.items():
                if len(self._kept) < 1000:
                    self._kept.setdefault(site, reason)


def _in_tiles(tiler: Tiler, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    return tiler.call(path, inner, args, kwargs)


class _LiveCall:
    """One outermost call in the live gear: follows the module calls and switches capturing on where the plan wants it."""

    def __init__(self, sites: SiteTable, calls: Counter[str], names: Callable[[], dict[int, str]], inbox: Inbox | None = None) -> None:
        self.policy = PlannedPolicy(sites, calls, names)
        self.session = LiveSession(self.policy, held_from=sites.held_from, inbox=inbox)
        self.capturing = False

    def around(self, path: str, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if below_backward():  # a recomputation of the user's own, inside a backward inside the forward
            return inner(*args, **kwargs)
        before, capturing = self.policy.enter(path), self.capturing
        self.switch(self.policy.frame.active)
        try:
            return inner(*args, **kwargs)
        finally:
            self.switch(capturing)
            self.policy.frame = before

    def switch(self, on: bool) -> None:
        """Capture from here on, or no longer."""
        if on and not self.capturing:
            self.session.on()
        elif self.capturing and not on:
            self.session.off()
        self.capturing = on


def apply(
    model: torch.nn.Module,
    plan: Plan,
    gear: str | None = None,
    *,
    new_shape: NewShape = "reuse",
    audit_every: int = 100,
    offload_to: str | Path | Store | None = None,
) -> Applied | AppliedCompiled:
    """Make the model run the plan from its next call on. A compiled model is compiled anew, split as the plan says.

    Args:
        model: the model that the plan was made for; it is not modified.
        plan: from ``solve``, or read from a file.
        gear: ``live`` or ``static``; the plan's own if None. A compiled model has one gear.
        new_shape: what to do with inputs of shapes that no plan was made for: ``reuse`` the plan's decisions (gradients
            are right, memory may differ; the report counts it), ``keep`` everything, or ``raise``.
        audit_every: in the static gear, every so many calls one runs in the live gear and the two are compared.
        offload_to: where offloaded activations wait: a directory for a plan that offloads to disk, or a store of your own
            (``recoup.torch.offload``); None for the directory that the plan's link was measured in.

    Raises:
        PlanMismatch: the plan names modules that the model does not have, or is for another front-end.
        OffloadError: the plan offloads, and the place cannot be used or has too little space.
        UsageError: an option has an unknown value.
    """
    if plan.offload_sites and plan.traffic is None:
        raise PlanMismatch(f"the plan offloads {min(plan.offload_sites)} and does not say how it moves (traffic); solve it for PyTorch")
    if is_compiled(model):
        if plan.tiles_by_module:
            raise PlanMismatch(f"the plan runs {min(plan.tiles_by_module)} in tiles, which compiled models do not")
        return _applied_to_compiled(model, plan, offload_to)
    if plan.frontend != "torch-eager":
        raise PlanMismatch(f"the plan is for {plan.frontend!r}; this model runs in PyTorch eager")
    return Applied(model, plan, gear, new_shape, audit_every, offload_to)


def _applied_to_compiled(model: torch.nn.Module, plan: Plan, offload_to: str | Path | Store | None) -> AppliedCompiled:
    from recoup.torch.compiled.apply import AppliedCompiled  # loads the compiler's private parts, which eager models do without

    refuse_planned(model)

    def forget() -> None:
        _planned.pop(model, None)

    applied = AppliedCompiled(model, plan, forget, offload_to)
    _planned[model] = True
    return applied
