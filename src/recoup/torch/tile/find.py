"""Finding the token-wise regions of a step: recorded calls of the right form, then the audit, then what each needs in pieces.

Maximal regions come first: what lies inside of a region that may run in tiles is not looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recoup.graph.tiles import TileRegion, loss_site
from recoup.torch.private import below_backward
from recoup.torch.recorder import Recorder
from recoup.torch.state import Snapshot
from recoup.torch.tile.audit import Verdict, audit_call, intercepted
from recoup.torch.tile.audit_loss import audit_losses
from recoup.torch.tile.spans import Loss, Range, Span, SpanRecorder
from recoup.torch.timing import clock_for

__all__ = ["find_regions"]

_SHARE = 0.002  # of the step's peak that a region makes for itself: smaller ones are not worth cutting
_REFUSED_FLAGS = {
    "random": "draws random numbers",
    "effect": "runs for its effect",
    "collective": "waits for other ranks",
    "decision": "decides on a route",
    "sync": "hands a number to Python",
}
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Parts:
    """Operations and saves of one region in the recorded step."""

    span: Span
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saves: tuple[int, ...]


def find_regions(
    step: Callable[[], object], model: torch.nn.Module, main: Recorder, device: torch.device, snapshot: Snapshot, peak_bytes: int
) -> tuple[TileRegion, ...]:
    """The token-wise regions of a recorded step, refused ones with the reason.

    Nothing if the step differs from run to run, or is one of several ranks'.

    Args:
        step: the step, which runs four times or so.
        model: whose modules are looked at.
        main: the recording that the regions' numbers are to fit.
        device: of the model.
        snapshot: of the state that each run starts from; restored at the end.
        peak_bytes: of the step; regions that make less than a five-hundredth of it for themselves are left out.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # How often the step runs here depends on what is found, and ranks that disagree would wait for each other for ever.
        return ()
    watcher = SpanRecorder(model, clock_for(device))
    watcher.record(step)
    snapshot.restore()
    if [op.site for op in watcher.ops] != [op.site for op in main.ops] or len(watcher.saves) != len(main.saves):
        return ()
    finder = _Finder(watcher, peak_bytes)
    regions = [*_losses(finder, step, model, snapshot), *_modules(finder, step, model, snapshot)]
    return tuple(sorted(regions, key=lambda region: (region.forward[:1], region.site)))


class _Finder:
    """Looks at the wiring of recorded spans."""

    def __init__(self, watcher: SpanRecorder, peak_bytes: int) -> None:
        self.watcher = watcher
        self.least_bytes = int(peak_bytes * _SHARE)
        self.by_node: dict[int, list[int]] = {}
        for number, node in enumerate(watcher.nodes):
            if node >= 0:
                self.by_node.setdefault(node, []).append(number)
        self.readers: dict[int, list[int]] = {}
        for number, op in enumerate(watcher.ops):
            for v in {ref.storage for ref in op.inputs} | set(op.mutates):
                self.readers.setdefault(v, []).append(number)

    def parts(self, span: Span, ranges: tuple[Range, ...]) -> _Parts:
        forward = sorted({op for one in ranges for op in one.ops})
        backward = sorted({op for one in ranges for node in one.nodes for op in self.by_node.get(node, ())})
        saves = sorted({save for one in ranges for save in one.saves})
        return _Parts(span, tuple(forward), tuple(backward), tuple(saves))

    def worthwhile(self, parts: _Parts) -> bool:
        """Whether the region makes enough for itself, beyond its result."""
        if not parts.forward or not parts.backward:
            return False
        made = {v.id: v.bytes for v in self.watcher.storages if v.producer is not None and v.producer in set(parts.forward)}
        result = made.get(parts.span.result, 0)
        return sum(made.values()) - result >= max(result, self.least_bytes, 1)

    def refusal(self, parts: _Parts, result: frozenset[int]) -> str:
        """Why the operations cannot become one, '' if they can; ``result`` are the storages that may be read outside."""
        watcher = self.watcher
        own = {*parts.forward, *parts.backward}
        made = {v.id for v in watcher.storages if v.producer is not None and v.producer in parts.forward}
        for number in parts.forward:
            op = watcher.ops[number]
            flag = next((flag for flag in op.flags if flag in _REFUSED_FLAGS), "")
            if flag:
                return f"{op.site} in it {_REFUSED_FLAGS[flag]}"
            if op.phase != "forward":
                return f"{op.site} in it is not of the forward"
            outside = [v for v in op.mutates if v not in made]
            if outside:
                return f"{op.site} in it writes what it did not make"
        for v in sorted(made - result):
            reader = next((number for number in self.readers.get(v, ()) if number not in own), None)
            if reader is not None:
                return f"{watcher.ops[reader].site} reads {watcher.storages[v].site}, which is made inside of it"
        begins: dict[int, int] = {}
        for number in parts.backward:
            begin = begins.setdefault(self._pass(number), number)
            for ref in watcher.ops[number].inputs:
                producer = watcher.storages[ref.storage].producer
                if producer is not None and producer not in own and begin < producer:
                    return f"its backward waits for {watcher.ops[producer].site}"
        return ""

    def narrowest(self, parts: _Parts) -> torch.dtype | None:
        """The narrowest float that the region computes in, if it is one of 16 bits: under autocast its results do not show it."""
        ops = (self.watcher.ops[number] for number in (*parts.forward, *parts.backward))
        found = {ref.view.dtype for op in ops for ref in (*op.inputs, *op.outputs)}
        return next((dtype for name, dtype in _NARROW.items() if name in found), None)

    def _pass(self, op: int) -> int:
        return sum(gap <= op for gap in self.watcher.backwards)

    def region(self, site: str, parts: _Parts, verdict: Verdict) -> TileRegion:
        span = parts.span
        return TileRegion(
            site=site, call=span.call, rows=span.rows, source=span.source,
            forward=parts.forward, backward=parts.backward, saves=parts.saves,
            samples=verdict.samples, error=verdict.error, reason=verdict.reason,
        )  # fmt: skip


# -- modules


def _modules(finder: _Finder, step: Callable[[], object], model: torch.nn.Module, snapshot: Snapshot) -> list[TileRegion]:
    heads = {(loss.head.path, loss.head.call) for loss in finder.watcher.losses}
    wanted: dict[tuple[str, int], tuple[_Parts, str]] = {}
    for span in finder.watcher.spans:
        parts = finder.parts(span, (span.range,))
        if (span.path, span.call) not in heads and finder.worthwhile(parts):
            wanted[(span.path, span.call)] = (parts, finder.refusal(parts, frozenset({span.result})))
    if not wanted:
        return []
    audit = _Audit(model, wanted, finder)
    with intercepted(model, audit.around):
        step()
    snapshot.restore()
    regions = [finder.region(path, wanted[path, call][0], verdict) for (path, call), verdict in audit.verdicts.items()]
    # A refused call around one that may run in tiles needs no mention.
    return [region for region in regions if not region.reason or not _around_another(region, regions)]


def _around_another(region: TileRegion, regions: list[TileRegion]) -> bool:
    own = set(region.forward)
    return any(other is not region and not other.reason and own.issuperset(other.forward) for other in regions)


class _Audit:
    """Audits the wanted calls as they come, the outermost first; of calls of one kind the first."""

    def __init__(self, model: torch.nn.Module, wanted: dict[tuple[str, int], tuple[_Parts, str]], finder: _Finder) -> None:
        self.modules = dict(model.named_modules())
        self.wanted = wanted
        self.finder = finder
        self.calls: dict[str, int] = {}
        self.verdicts: dict[tuple[str, int], Verdict] = {}
        self.kinds: dict[object, Verdict] = {}
        self.depth = 0
        self.inside = False
        self.busy = False

    def around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        # Calls are counted as recording counts them.
        if self.busy or below_backward() or not (self.depth or torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        key = (path, self.calls.get(path, 0))
        self.calls[path] = key[1] + 1
        before = self.inside
        if not self.inside and key in self.wanted:
            self.verdicts[key] = verdict = self._verdict(key, inner, args, kwargs)
            self.inside = not verdict.reason
        self.depth += 1
        try:
            return inner(*args, **kwargs)
        finally:
            self.depth -= 1
            self.inside = before

    def _verdict(self, key: tuple[str, int], inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Verdict:
        parts, refusal = self.wanted[key]
        if refusal:
            return Verdict(refusal)
        module = self.modules[key[0]]
        kind = self._kind(module, parts)
        if kind not in self.kinds:
            self.busy = True
            try:
                with torch.random.fork_rng(devices=[]):
                    self.kinds[kind] = audit_call(key[0], module, inner, args, kwargs, self.finder.narrowest(parts))
            finally:
                self.busy = False
        return self.kinds[kind]

    def _kind(self, module: torch.nn.Module, parts: _Parts) -> object:
        """What makes two calls alike: the classes and plain attributes of all modules in it, the operations and their sizes."""
        watcher = self.finder.watcher
        shape = tuple(
            (
                type(part),
                tuple(sorted((name, repr(value)) for name, value in vars(part).items() if isinstance(value, (bool, int, float, str)))),
            )
            for part in module.modules()
        )
        hooks = tuple(bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks) for part in module.modules())
        grads = tuple(parameter.requires_grad for parameter in module.parameters())
        ops = tuple((watcher.ops[op].target, tuple(ref.view for ref in watcher.ops[op].inputs)) for op in parts.forward)
        return shape, hooks, grads, ops


# -- losses


def _losses(finder: _Finder, step: Callable[[], object], model: torch.nn.Module, snapshot: Snapshot) -> list[TileRegion]:
    found: dict[tuple[str, int], tuple[_Parts, str]] = {}
    for loss in finder.watcher.losses:
        parts = finder.parts(loss.head, loss.ranges)
        if not finder.worthwhile(parts):
            continue
        key = (loss.head.path, loss.head.call)
        refusal = "its result goes into more than one loss" if key in found else finder.refusal(parts, _results(finder, loss))
        found[key] = (parts, refusal)
    sites = {loss_site(path) for (path, _), (_, refusal) in found.items() if not refusal}
    narrow = [dtype for parts, _ in found.values() if (dtype := finder.narrowest(parts)) is not None]
    verdicts = audit_losses(sites, step, model, snapshot, next(iter(narrow), None)) if sites else {}
    return [
        finder.region(loss_site(path), parts, Verdict(refusal) if refusal else verdicts[loss_site(path)])
        for (path, _), (parts, refusal) in found.items()
    ]


def _results(finder: _Finder, loss: Loss) -> frozenset[int]:
    """What the cross-entropy gives."""
    ops = loss.ranges[-1].ops
    return frozenset(ref.storage for ref in finder.watcher.ops[ops[-1]].outputs[:1]) if ops else frozenset()
