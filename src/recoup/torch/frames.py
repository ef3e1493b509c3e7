"""Where in the module tree an operation runs: frames, and the counting that gives operations their sites.

Recording and the live gear count in the same way, so that a site found by the one is met by the other: calls of a
module are counted within a step, operations of a name within a call, views and bookkeeping not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from recoup.graph.site import site_of
from recoup.torch.naming import Namer
from recoup.torch.traits import Traits

__all__ = ["OUTSIDE", "Frame"]

# The path of what runs outside of every module: the user's loss, the optimizer.
OUTSIDE = "~"


class Frame:
    """One call of one module: its path, which call of it in the step, and how often each operation ran in it."""

    __slots__ = ("call", "counts", "namer", "path")

    def __init__(self, path: str, call: int) -> None:
        self.path = path
        self.call = call
        self.counts: Counter[str] = Counter()
        self.namer: Namer | None = None

    def names(self, look: Callable[[], dict[int, str]]) -> Namer:
        """The namer of tensors read here."""
        if self.namer is None:
            self.namer = Namer(look, f"module {self.path!r}")
        return self.namer

    def count(self, traits: Traits) -> int:
        """Take the next number for an operation of that name."""
        nth = self.counts[traits.name]
        self.counts[traits.name] = nth + 1
        return nth

    def site(self, traits: Traits) -> str:
        """The site of the operation last counted."""
        return site_of(self.path, self.call, traits.name, self.counts[traits.name] - 1)
