"""A plan's sites, as the graphs of a compiled step know them."""

from __future__ import annotations

from recoup.plan import Plan
from recoup.torch.compiled.session import AWAY, Label, Local

__all__ = ["decisions_of"]


def decisions_of(plan: Plan, label: Label) -> Local:
    """What a plan says for the graph with this label; sites of other graphs may be among it, and find nothing there."""
    held = plan.held_from_sites
    own = ((site, _local(site, label)) for site in plan.recompute_sites)
    rebuilt = {(local, _local(held.get(site, ""), label) or "") for site, local in own if local}
    return frozenset(rebuilt | {(local, AWAY) for site in plan.offload_sites if (local := _local(site, label))})


def _local(site: str, label: Label) -> str | None:
    """A site of the step as a site of the graph with this label; None if it lies elsewhere."""
    path, slash, rest = site.partition("/")
    path, _, turn = path.partition("@")
    if int(turn or 0) != label.turn or not (path + ".").startswith(label.prefix + "." if label.prefix else ""):
        return None
    return f"{path[len(label.prefix) :].lstrip('.')}{slash}{rest}"
