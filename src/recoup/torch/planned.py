"""The live gear's policy under a plan: capture what the plan recomputes, met by site; keep everything else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recoup.errors import PlanMismatch
from recoup.graph.site import expand
from recoup.plan import Plan
from recoup.torch.capture import Captured, Version
from recoup.torch.frames import Frame
from recoup.torch.naming import Namer
from recoup.torch.traits import Traits

__all__ = ["PlannedFrame", "PlannedPolicy", "SiteTable", "parse_site"]

_SITE = re.compile(r"^(?P<path>[^@/]*)(?:@(?P<call>[0-9]+))?/(?P<name>[^#:]+)(?:#(?P<nth>[0-9]+))?(?::(?P<output>[0-9]+))?$")
_NOTHING: dict[tuple[str, int], frozenset[int]] = {}


class Place(NamedTuple):
    """A storage site, taken apart."""

    path: str
    call: int
    name: str
    nth: int
    output: int


def parse_site(site: str) -> Place:
    """The parts of a site.

    Raises:
        PlanMismatch: the text is no site.
    """
    match = _SITE.match(site)
    if match is None:
        raise PlanMismatch(f"{site!r} is not a site; a site reads module.path/operation, such as layers.0.mlp/gelu")
    return Place(match["path"], int(match["call"] or 0), match["name"], int(match["nth"] or 0), int(match["output"] or 0))


class SiteTable:
    """A plan's sites by module call: for each operation to look at, the outputs to drop (none where all that goes is offloaded).

    Raises:
        PlanMismatch: a site of the plan names a module that the model does not have.
    """

    def __init__(self, plan: Plan, model: torch.nn.Module) -> None:
        self.plan = plan
        wanted: dict[tuple[str, int], dict[tuple[str, int], set[int]]] = {}
        paths = {path for path, _ in model.named_modules()}
        for site in sorted(plan.recompute_sites | plan.offload_sites):
            place = parse_site(site)
            if place.path not in paths:
                raise PlanMismatch(
                    f"the plan names {site}, but the model has no module {place.path!r}; was the plan made for another model?"
                )
            outputs = wanted.setdefault((place.path, place.call), {}).setdefault((place.name, place.nth), set())
            if site in plan.recompute_sites:
                outputs.add(place.output)
        self.signature = plan.signature
        self.calls = {key: {op: frozenset(outputs) for op, outputs in ops.items()} for key, ops in wanted.items()}
        self.held_from = plan.held_from_sites
        self.offloaded = plan.offload_sites
        self.watched = {_module_call(text) for pattern in plan.watch for text in expand(pattern)}

    def of(self, path: str, call: int) -> dict[tuple[str, int], frozenset[int]]:
        """What to capture in one call of a module."""
        return self.calls.get((path, call), _NOTHING)

    def active(self, path: str, call: int) -> bool:
        """Whether operations of that call must be seen at all."""
        return (path, call) in self.calls or (path, call) in self.watched


def _module_call(text: str) -> tuple[str, int]:
    path, _, call = text.partition("@")
    return path, int(call or 0)


class PlannedFrame(Frame):
    """A frame with the plan's part for it."""

    __slots__ = ("active", "table")

    def __init__(self, path: str, call: int, sites: SiteTable) -> None:
        super().__init__(path, call)
        self.table = sites.of(path, call)
        self.active = sites.active(path, call)


class PlannedPolicy:
    """Captures by site. ``met`` counts the operations of the plan that came, ``expected`` those of the module calls that were made."""

    def __init__(self, sites: SiteTable, calls: Counter[str], names: Callable[[], dict[int, str]]) -> None:
        self.sites = sites
        self.calls = calls
        self.names = names
        self.frame = PlannedFrame("", 0, sites)
        self.outputs: frozenset[int] = frozenset()
        self.expected = 0
        self.met = 0
        self.reasons: dict[str, str] = {}

    def enter(self, path: str) -> PlannedFrame:
        """A module is called: its frame becomes the current one; returns the one before."""
        before = self.frame
        call = self.calls[path]
        self.calls[path] = call + 1
        self.frame = PlannedFrame(path, call, self.sites)
        self.expected += len(self.frame.table)
        return before

    def wants(self, traits: Traits) -> bool:
        """Whether the plan recomputes or offloads an output of this operation."""
        frame = self.frame
        outputs = frame.table.get((traits.name, frame.count(traits)))
        if outputs is None:
            return False
        self.outputs = outputs
        self.met += 1
        return True

    def rebuilds(self) -> bool:
        """Whether an output of the operation last counted is recomputed."""
        return bool(self.outputs)

    def site(self, traits: Traits) -> str:
        """The site of the operation last counted."""
        return self.frame.site(traits)

    def keeps(self, op: Captured, place: int, tensor: Tensor) -> str:
        """Why an output stays, '' if it may go."""
        if place not in self.outputs:
            return "kept by the plan"
        if op.traits.decision and not tensor.is_floating_point():
            return "a decision (indices), which must not flip"
        return ""

    def drops(self, version: Version, tensor: Tensor) -> bool:
        """Whatever the plan has captured is dropped."""
        return True

    def namer(self) -> Namer:
        """Who can name tensors read in the current module call."""
        return self.frame.names(self.names)

    def kept(self, site: str, reason: str) -> None:
        """Note what the plan recomputes and had to be kept."""
        if reason != "kept by the plan" and site not in self.sites.offloaded:
            self.reasons.setdefault(site, reason)
