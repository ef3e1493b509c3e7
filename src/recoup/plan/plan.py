"""A plan: for each activation of a step, keep or recompute, with what was promised and proven.

A plan is frozen data. Activations that no decision names are kept; an activation that autograd does not save and
that is kept is held only where a replay reads it. ``recoup.plan.file`` reads and writes it as JSON.
"""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from typing import Literal

import msgspec

from recoup.cost.transfer import OffloadLink, Target
from recoup.graph.site import expand

__all__ = ["FORMAT", "Action", "Decision", "Plan", "Traffic"]

FORMAT = 1
Action = Literal["keep", "recompute", "offload", "tile"]


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How offloaded activations move.

    Attributes:
        link: the figures that the plan was made with.
        write_window_bytes: at most so many bytes (or one storage) are on their way out at once; the forward waits for room.
        read_window_bytes: at most so many bytes (or one storage) are fetched ahead of their use.
        offloaded_bytes: what waits on the target at once, in whole pages.
        limit_bytes: what may wait there at once; None for no limit. What finds no room stays in memory.
        stall_seconds: simulated seconds that the step waits for the link.
    """

    link: OffloadLink
    write_window_bytes: int
    read_window_bytes: int
    offloaded_bytes: int = 0
    limit_bytes: int | None = None
    stall_seconds: float = 0.0


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One decision, for one storage or for a range of identical layers.

    Attributes:
        site: storage site, ranges collapsed: ``layers.[0-11].mlp/gelu``.
        action: ``keep``, ``recompute``, ``offload`` to ``target``, or ``tile``: run the module call in pieces.
        bytes: bytes of all storages that the site names.
        why: the reason, as a person reads it.
        held_from: for ``recompute``, the site that the backward must have asked for before a rebuilt copy is held; until then
            the storage is rebuilt whenever a replay needs it. A range as long as that of ``site`` goes with it layer by
            layer; '' holds every copy from the first one on.
        target: for ``offload``, where the storage waits.
        tiles: for ``tile``, in how many pieces the region that ``site`` names runs: a module's path, or ``path/cross_entropy`` for a
            vocabulary projection with its loss.
    """

    site: str
    action: Action
    bytes: int
    why: str = ""
    held_from: str = ""
    target: Target = "host"
    tiles: int = 0

    @property
    def holds(self) -> dict[str, str]:
        """For each site the one that it is held from; empty where every copy is held.

        Raises:
            ValueError: the two ranges do not go together, or one is malformed.
        """
        if not self.held_from:
            return {}
        sites, triggers = expand(self.site), expand(self.held_from)
        if len(triggers) not in (1, len(sites)):
            raise ValueError(f"{self.site} names {len(sites)} sites, but {self.held_from} names {len(triggers)}")
        return dict(zip(sites, triggers * len(sites) if len(triggers) == 1 else triggers, strict=True))


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What to do with the activations of a step.

    Attributes:
        format: version of the plan file.
        frontend: ``torch-eager`` and so on.
        fingerprint: of the graph the plan was made for.
        signature: the model's input shapes that it was made for.
        environment: versions and settings it was made under.
        gear: ``live``, ``static``, ``compiled`` or ``jit``, the executor whose capabilities it was solved for.
        strategy: who decided.
        budget_bytes: the budget; 0 for a strategy that has none.
        peak_bytes: simulated peak of the planned step.
        step_seconds: simulated time of the planned step.
        unplanned_peak_bytes: simulated peak of the unplanned step.
        unplanned_step_seconds: measured time of the unplanned step.
        bound_seconds: no plan for this budget, graph and executor takes less time, however often it replays.
        gap: ``(step_seconds - bound_seconds) / bound_seconds``; 0 is proven optimal.
        price_seconds_per_byte: what one more byte of budget would save, by the linear program: exact for small changes of a plan
            that recomputes once, too low for one that recomputes more often; None if not known.
        binding: the moments at which memory binds, in words, the most expensive first.
        solve_seconds: time the solver took.
        root_calls: how many outermost calls of the model's modules one step makes.
        watch: module calls (``path`` or ``path@call``, ranges collapsed) in which other modules' dropped storages are written in place.
        traffic: how offloaded storages move; None where nothing is offloaded or the front-end moves them by itself (JAX).
        stretches: for loops that are split (JAX), the turns of a stretch, outermost first, by the loop's module path.
        decisions: what is decided, in the order of the step.
    """

    format: int = FORMAT
    frontend: str = "torch-eager"
    fingerprint: str
    signature: str = ""
    environment: dict[str, str] = {}
    gear: Literal["live", "static", "compiled", "jit"] = "live"
    strategy: str
    budget_bytes: int = 0
    peak_bytes: int
    step_seconds: float
    unplanned_peak_bytes: int
    unplanned_step_seconds: float
    bound_seconds: float = 0.0
    gap: float | None = None
    price_seconds_per_byte: float | None = None
    binding: tuple[str, ...] = ()
    solve_seconds: float = 0.0
    root_calls: int = 1
    watch: tuple[str, ...] = ()
    traffic: Traffic | None = None
    stretches: dict[str, tuple[int, ...]] = {}
    decisions: tuple[Decision, ...] = ()

    @cached_property
    def recompute_sites(self) -> frozenset[str]:
        """Sites of the storages to recompute, ranges expanded."""
        return frozenset(site for decision in self.decisions if decision.action == "recompute" for site in expand(decision.site))

    @cached_property
    def offload_sites(self) -> frozenset[str]:
        """Sites of the storages that wait in the host's memory or on disk, ranges expanded."""
        return frozenset(site for decision in self.decisions if decision.action == "offload" for site in expand(decision.site))

    @cached_property
    def tiles_by_module(self) -> dict[str, int]:
        """For each module that runs in pieces, by path (``path/cross_entropy`` with its loss), in how many; ranges expanded."""
        return {path: decision.tiles for decision in self.decisions if decision.action == "tile" for path in expand(decision.site)}

    @cached_property
    def held_from_sites(self) -> dict[str, str]:
        """For each site whose copies are held only from some moment on, the site that begins it; ranges expanded."""
        return {site: trigger for decision in self.decisions for site, trigger in decision.holds.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON that a person can read and compare; ``recoup.load_plan`` reads it back.

        Raises:
            UsageError: the path cannot be written.
        """
        from recoup.plan.file import save_plan  # reads and writes plans, so it imports this module

        save_plan(self, path)

    def explain(self) -> str:
        """What the plan promises, decides and proves, in words; ``recoup.explain`` also says what stands at the peak of its step."""
        from recoup.plan.words import decisions_in_words, promise_in_words  # they speak of plans, so they import this module

        return "\n".join([*promise_in_words(self), *decisions_in_words(self)])

    @property
    def drops_nothing(self) -> bool:
        """Whether the planned step is the unplanned one."""
        return not (self.recompute_sites or self.offload_sites or self.tiles_by_module or self.stretches)
