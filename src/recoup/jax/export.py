"""A plan for those who keep their own trainer: by the tags of ``jax.ad_checkpoint.checkpoint_name``.

A policy sees names, not values, so all that carries one tag is kept or all of it is made again. What carries no tag is made again by
such a policy, whatever the plan says of it. ``named_actions`` says what the plan does with each tag; a tag that the plan splits
is kept if more than half of its bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from recoup.errors import UsageError
from recoup.jax.recording import Recording
from recoup.plan import Plan

__all__ = ["check_names", "maxtext", "named_actions", "named_bytes", "policy"]

Action = Literal["keep", "recompute", "offload"]

_MAXTEXT: dict[Action, str] = {"keep": "device", "recompute": "remat", "offload": "offload"}


def named_bytes(recording: Recording) -> dict[str, int]:
    """Bytes of all values that carry each tag, over all turns of loops."""
    sizes = _sizes(recording)
    return {name: sum(sizes[site] for site in sites) for name, sites in recording.names.items()}


def check_names(recording: Recording, names: Sequence[str]) -> None:
    """Passes if every name is a tag of the step.

    Raises:
        UsageError: one is not, or there is one twice; the message lists the tags that there are.
    """
    there = ", ".join(sorted(recording.names)) or "none: tag values with jax.ad_checkpoint.checkpoint_name"
    for name in names:
        if name not in recording.names:
            raise UsageError(f"no value of the step is named {name!r}; names in it: {there}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UsageError(f"{twice[0]!r} is named twice; a value is kept, made again or offloaded, one of them")


def named_actions(recording: Recording, plan: Plan, names: Sequence[str] | None = None) -> dict[str, Action]:
    """What the plan does with each tag.

    Args:
        recording: the recorded step.
        plan: a plan of it.
        names: tags to look at, all by default.

    Raises:
        UsageError: a name is no tag of the step.
    """
    if names is not None:
        check_names(recording, names)
    sizes = _sizes(recording)
    chosen = recording.names if names is None else {name: recording.names[name] for name in names}
    return {name: _action(sites, plan, sizes) for name, sites in chosen.items()}


def maxtext(recording: Recording, plan: Plan, names: Sequence[str] | None = None) -> dict[str, str]:
    """The plan as MaxText's tensor map, for ``remat_policy: custom``: each tag to ``device``, ``remat`` or ``offload``.

    Raises:
        UsageError: a name is no tag of the step.
    """
    return {name: _MAXTEXT[action] for name, action in named_actions(recording, plan, names).items()}


def policy(recording: Recording, plan: Plan, names: Sequence[str] | None = None) -> Callable[..., Any]:
    """The plan as a policy for ``jax.checkpoint`` on blocks and bodies of scans, by tags.

    Raises:
        UsageError: a name is no tag of the step, or the step has none.
    """
    import jax

    if not recording.names:
        raise UsageError("no value of the step is named; tag values with jax.ad_checkpoint.checkpoint_name and record again")
    by_action: dict[Action, list[str]] = {"keep": [], "recompute": [], "offload": []}
    for name, action in named_actions(recording, plan, names).items():
        by_action[action].append(name)
    if not by_action["offload"]:
        return jax.checkpoint_policies.save_only_these_names(*by_action["keep"])
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=by_action["keep"], names_which_can_be_offloaded=by_action["offload"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def _action(sites: Sequence[str], plan: Plan, sizes: Mapping[str, int]) -> Action:
    total = {"keep": 0, "recompute": 0, "offload": 0}
    for site in sites:
        total[_of_site(site, plan)] += max(sizes[site], 1)
    best: Action = "recompute"
    if total["keep"] * 2 > sum(total.values()):
        best = "keep"
    elif total["offload"] * 2 > sum(total.values()):
        best = "offload"
    return best


def _of_site(site: str, plan: Plan) -> Action:
    if site in plan.offload_sites:
        return "offload"
    return "recompute" if site in plan.recompute_sites else "keep"


def _sizes(recording: Recording) -> dict[str, int]:
    """Bytes of each storage by site, those of loops' bodies for all turns."""
    found = {storage.site: storage.bytes for storage in recording.graph.storages if storage.site}
    stack = [(body, body.turns) for body in recording.loops]
    while stack:
        body, turns = stack.pop()
        found.update((storage.site, storage.bytes * turns) for storage in body.graph.storages if storage.site)
        stack.extend((inner, turns * inner.turns) for inner in body.loops)
    return found
