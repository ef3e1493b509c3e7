"""What a replay needs: captured operations, and the versions of storages that they make.

Every write makes a new :class:`Version` of a storage (static single assignment over memory), so that the captured
operations form an acyclic graph whatever was edited in place, and references free what is no longer needed: autograd
holds a :class:`Handle`, the handle holds its version, the version the operation that makes it, the operation the
versions and leaves it reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from recoup.torch.holding import Leaf
from recoup.torch.traits import Traits
from recoup.torch.views import Layout

if TYPE_CHECKING:
    from recoup.torch.rebuild import Rebuilder

__all__ = ["Argument", "Captured", "GeneratorState", "Handle", "Milestone", "Version", "capture_generator"]

# One process-wide default generator per device: captures and replays of operations that can take no other must not interleave.
generator_lock = threading.RLock()


class Argument(NamedTuple):
    """A tensor argument of a captured operation: a layout on a version or on a leaf."""

    source: Version | Leaf
    layout: Layout


class GeneratorState(NamedTuple):
    """Where the random numbers of one operation came from: the argument to replace ('' for the default generator) and the state."""

    argument: str
    place: int
    device: torch.device
    state: Tensor


class Captured:
    """One operation as it ran in the forward, ready to run again.

    Attributes:
        sequence: place in the order of capture; replays run in this order.
        arguments, keywords: as passed, each tensor replaced by an :class:`Argument`.
        inputs: the distinct versions read, those written excluded.
        overwrites: versions that it writes in place, each with the version that results.
        outputs: the versions it makes on fresh storages, with the place among its result tensors.
    """

    __slots__ = (
        "__weakref__",
        "arguments",
        "func",
        "generator",
        "inputs",
        "keywords",
        "outputs",
        "overwrites",
        "pending",
        "sequence",
        "site",
        "stamp",
        "traits",
    )

    def __init__(self, sequence: int, func: Callable[..., object], traits: Traits, site: str) -> None:
        self.sequence = sequence
        self.func = func
        self.traits = traits
        self.site = site
        self.arguments: tuple[object, ...] = ()
        self.keywords: dict[str, object] = {}
        self.inputs: tuple[Version, ...] = ()
        self.overwrites: list[tuple[Version, weakref.ref[Version]]] = []
        self.outputs: list[tuple[int, weakref.ref[Version]]] = []
        self.generator: GeneratorState | None = None
        # Of the backward pass under way: which one, and for how many versions this is still to run.
        self.stamp = 0
        self.pending = 0


class Milestone:
    """A point of the backward: reached once a pass (``stamp``) has asked for a certain site."""

    __slots__ = ("stamp",)

    def __init__(self) -> None:
        self.stamp = 0


class Version:
    """The content of a storage after one write, and how to make it again.

    ``held_from`` is the milestone from which on a rebuilt value is held (None: always), ``milestone`` the one that asking
    for this version reaches.

    ``stamp``, ``asks``, ``held``, ``reads`` and ``value`` belong to the backward pass under way: the pass they were set
    for, how often it may still ask for the value, whether a value has been held in it, the reads to come within one
    replay of a value that is not held, and the rebuilt tensor.
    """

    __slots__ = ("__weakref__", "asks", "covered", "held", "held_from", "milestone", "nbytes", "op", "reads", "site", "stamp", "value")

    def __init__(
        self, op: Captured, site: str, nbytes: int, covered: int, held_from: Milestone | None, milestone: Milestone | None
    ) -> None:
        self.op = op
        self.site = site
        self.nbytes = nbytes
        self.covered = covered  # bytes that visible operations have written; memory from empty() starts at 0
        self.held_from = held_from
        self.milestone = milestone
        self.stamp = 0
        self.asks = 0
        self.held = False
        self.reads = 0
        self.value: Tensor | None = None

    def holds(self, stamp: int) -> bool:
        """Whether a value made now, in that pass, is to be held."""
        return self.held_from is None or self.held_from.stamp == stamp

    @property
    def initialised(self) -> bool:
        """Whether visible operations have filled it; if not, a kernel behind the dispatcher's back may do so."""
        return self.covered >= self.nbytes


class Handle:
    """What autograd holds in place of a dropped tensor."""

    __slots__ = ("__weakref__", "layout", "probe", "rebuilder", "version")

    def __init__(self, rebuilder: Rebuilder, version: Version, layout: Layout) -> None:
        self.rebuilder = rebuilder
        self.version = version
        self.layout = layout
        self.probe: object = None


def capture_generator(traits: Traits, args: tuple[object, ...], kwargs: dict[str, object], device: torch.device) -> GeneratorState:
    """The state of the generator that a random operation is about to draw from."""
    place = traits.generator_place
    given = args[place] if 0 <= place < len(args) else kwargs.get(traits.generator)
    generator = given if isinstance(given, torch.Generator) else default_generator(device)
    return GeneratorState(traits.generator, place, generator.device, generator.get_state())


def default_generator(device: torch.device) -> torch.Generator:
    """The process-wide generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
