"""The compiled graphs of one step while Recoup decides about them: what they are, who calls them, what each call runs.

Dynamo hands over a graph when it first meets it. The same graph may serve many calls (each block compiled on its own): a
call is told apart by the parameters that it is given, and has a *label*, the path of the module that owns them. Each label
has its own decisions; labels with the same decisions share one compiled variant of the graph.

A step is over once a backward pass has reached one of its results; the next call begins a new one. Labels are numbered within
a step, so that a graph compiled for another shape takes the place, and the decisions, of the one that it stands for.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from recoup.torch.compiled.emit import emit
from recoup.torch.compiled.interfaces import Compiled, Compiler, CustomPartitionerFn, Recompilable, keep_all
from recoup.torch.compiled.joint import Joint, joint_of
from recoup.torch.private import call_at_end_of_backward

__all__ = ["AWAY", "Chooser", "Label", "Local", "Logged", "Piece", "Session", "memories"]

AWAY = "away"
"""Stands beside the site of a storage that is offloaded; no site is called that."""

Local = frozenset[tuple[str, str]]
"""Decisions for one graph: for each storage site to recompute the site that it is held from, or ''; for one to offload ``AWAY``."""


@dataclass(frozen=True, slots=True)
class Label:
    """Which call of the step: the path of the module that owns the parameters, and a number where that alone is not unique."""

    prefix: str
    turn: int


class Chooser(Protocol):
    """Decides for each graph and label.

    Attributes:
        looks: whether every joint graph must be seen, so that none may come out of AOTAutograd's cache.
    """

    @property
    def looks(self) -> bool:
        """See above."""
        ...

    def decisions(self, piece: Piece, label: Label) -> Local | None:
        """What is recomputed, where that is known before the joint graph is; None if it must be seen first."""
        ...

    def choose(self, piece: Piece, label: Label, joint: Joint) -> Local:
        """What is recomputed, now that the joint graph is at hand."""
        ...

    def key(self, piece: Piece, label: Label) -> bytes:
        """What PyTorch's own caches tell decisions apart by."""
        ...

    def step_begins(self) -> None:
        """The next call is the first of a step."""
        ...

    def before(self, piece: Piece, label: Label) -> None:
        """A call is about to run."""
        ...

    def after(self, call: Logged) -> None:
        """A call has run."""
        ...

    def backward_ends(self) -> None:
        """A backward pass that reached the step's results is over."""
        ...


@dataclass(frozen=True, slots=True)
class Logged:
    """One call that was seen.

    Attributes:
        piece: its graph.
        label: which call of the step it is.
        inputs: where its inputs lie in memory; 0 for what has none.
        outputs: where its results lie.
        alive: for each result whether its memory is still there; None if it has none.
    """

    piece: Piece
    label: Label
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    alive: tuple[Callable[[], object] | None, ...] = ()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Piece:
    """One graph that dynamo handed over, and the ways in which it has been compiled.

    It lives as long as dynamo keeps the code that calls it, or a step that it is part of is under way.
    """

    number: int
    source: Recompilable
    names: list[tuple[int, str]]
    joint: Joint | None = None
    variants: dict[Local, Compiled] = field(default_factory=dict)
    labels: dict[int, Label] = field(default_factory=dict)
    by_label: dict[Label, Compiled] = field(default_factory=dict)


class Session:
    """Hands out what runs for every compiled graph; ``handle`` is what a backend calls."""

    def __init__(self, chooser: Chooser, names: Mapping[int, str] | None = None) -> None:
        self.chooser = chooser
        self.names = names or {}
        self.pieces: weakref.WeakSet[Piece] = weakref.WeakSet()
        self._numbers = itertools.count()
        self.logging = False
        # Where the inputs lie of the call that a new graph is being compiled for.
        self.arriving: tuple[int, ...] = ()
        # How many labels with each prefix the step under way has had, and whether its backward has begun.
        self._turns: dict[str, int] = {}
        self._over = False
        self._lock = threading.RLock()

    def use(self, chooser: Chooser) -> None:
        """Let another chooser decide from the next call on; what was compiled for the same decisions before is not compiled again."""
        self.chooser = chooser
        for piece in self.pieces:
            piece.by_label.clear()

    def handle(self, gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Compiled:
        """A new graph: compiled for the call that is about to come, and dispatched for all that follow."""
        self._begin_step()
        source = Recompilable(gm, compiler)
        piece = Piece(next(self._numbers), source, source.parameters())
        self.pieces.add(piece)
        first = self._label(piece, inputs)
        self.arriving = memories(inputs)
        piece.by_label[first] = self._compiled(piece, first, inputs)

        def run(*args: Any) -> Any:
            self._begin_step()
            label = self._label(piece, args)
            self.chooser.before(piece, label)
            compiled = piece.by_label.get(label)
            if compiled is None:
                with self._lock:
                    self.arriving = memories(args)
                    compiled = piece.by_label[label] = self._compiled(piece, label, None)
            before = memories(args) if self.logging else ()
            results = compiled(*args)
            leaves = tree_leaves(results)
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._backward_began)
            if self.logging:
                self.chooser.after(Logged(piece, label, before, memories(leaves), tuple(map(_watch, leaves))))
            return results

        return run

    def _backward_began(self, gradient: Tensor) -> None:
        if self.logging and not self._over:
            call_at_end_of_backward(self.chooser.backward_ends)
        self._over = True

    def _begin_step(self) -> None:
        if self._over:
            self._over = False
            self._turns.clear()
            self.chooser.step_begins()

    def _label(self, piece: Piece, args: Sequence[Any]) -> Label:
        place, name = piece.names[0] if piece.names else (-1, "")
        # A graph cut up by DDP is compiled on traced tensors: its label waits for the parameters of the first real call.
        traced = place >= 0 and isinstance(args[place], FakeTensor)
        owner = 0 if place < 0 or traced else id(args[place])
        label = piece.labels.get(owner)
        if label is None and 0 in piece.labels:
            label = piece.labels[owner] = piece.labels.pop(0)
        if label is None:
            full = self.names.get(args[place].data_ptr(), "") if place >= 0 and not traced else ""
            prefix = full.removesuffix(name).rstrip(".") if full.endswith(name) else ""
            label = piece.labels[owner] = Label(prefix, self._turns.get(prefix, 0))
        if torch.is_grad_enabled():  # a graph without a backward takes nobody's place
            self._turns[label.prefix] = max(self._turns.get(label.prefix, 0), label.turn + 1)
        return label

    def _compiled(self, piece: Piece, label: Label, inputs: Sequence[Any] | None) -> Compiled:
        known = self.chooser.decisions(piece, label)
        if known is not None and known in piece.variants:
            return piece.variants[known]
        split = _Split(self.chooser, piece, label, moves=any(how == AWAY for _, how in known or ()))
        compiled = piece.source.compiled(split, inputs, looks=self.chooser.looks)
        if known is not None:
            piece.variants[known] = compiled
        return compiled


class _Split(CustomPartitionerFn):
    """The partitioner of one compilation; ``moves`` says whether it may offload, which the compiler below must know."""

    def __init__(self, chooser: Chooser, piece: Piece, label: Label, *, moves: bool) -> None:
        self.moves = moves
        self.chooser = chooser
        self.piece = piece
        self.label = label

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: Inductor copies its settings, and this one is an identity."""
        return self

    def uuid(self) -> bytes:
        """What tells these decisions apart in PyTorch's caches."""
        return self.chooser.key(self.piece, self.label)

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: object,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward, split by what the chooser says."""
        joint = joint_of(gm, num_fwd_outputs, static_lifetime_input_indices or (), fuses=self.piece.source.fuses)
        if joint.graph.backwards[0] == len(joint.graph.ops) - 1:  # no operation behind what happens outside
            return keep_all(gm, joint_inputs, num_fwd_outputs, static_lifetime_input_indices or ())
        if self.piece.joint is None:
            self.piece.joint = joint
        by_site = {storage.site: storage.id for storage in joint.graph.storages if storage.site}
        chosen = [(by_site[site], trigger) for site, trigger in self.chooser.choose(self.piece, self.label, joint) if site in by_site]
        held = {v: by_site[trigger] for v, trigger in chosen if trigger in by_site}
        away = frozenset(v for v, how in chosen if how == AWAY)
        assert self.moves or not away, "what may be offloaded is known before a graph is compiled"
        return emit(joint, frozenset(v for v, _ in chosen) - away, held, away)


def _watch(leaf: object) -> Callable[[], object] | None:
    """Says whether a tensor's memory is still there, and does not keep it."""
    return weakref.ref(leaf.untyped_storage()) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else None


def memories(leaves: Sequence[object]) -> tuple[int, ...]:
    """Where each tensor's storage lies; 0 for what has no memory of its own."""
    strided = (isinstance(leaf, Tensor) and leaf.layout is torch.strided and not isinstance(leaf, FakeTensor) for leaf in leaves)
    return tuple(leaf.untyped_storage().data_ptr() if plain else 0 for leaf, plain in zip(leaves, strided, strict=True))  # type: ignore[attr-defined]
