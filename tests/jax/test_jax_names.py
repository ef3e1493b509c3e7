"""Names: plans exported by tags, misspelt ones refused, sites that collapse over layers; offloading's logic."""

from __future__ import annotations

from typing import Any

import losses
import pytest
from planning import recorded

import recoup.jax
from recoup.errors import UsageError
from recoup.jax.offload import Link, with_offload
from recoup.jax.solving import unplanned_peak_bytes
from recoup.plan import Decision, Plan

jax = pytest.importorskip("jax")
jnp = jax.numpy


def tagged(ws: Any, x: Any) -> Any:
    from jax.ad_checkpoint import checkpoint_name

    for layer in range(4):
        with jax.named_scope(f"layers.{layer}"):
            hidden = checkpoint_name(jnp.tanh(x @ ws[layer]), "hidden")
            x = checkpoint_name(jnp.sin(hidden @ ws[layer]), "out")
    return jnp.square(x).mean()


WS, X = jnp.ones((4, 32, 32)) / 16, jnp.ones((256, 32))


def _tagged() -> losses.Made:
    return tagged, (WS, X)


def _by_hand(recording: recoup.jax.Recording, **actions: str) -> Plan:
    decisions = tuple(
        Decision(site=site, action=action, bytes=0)
        for name, action in actions.items()
        for site in recording.names[name]  # type: ignore[arg-type]
    )
    facts = {"strategy": "by hand", "peak_bytes": 1, "step_seconds": 1, "unplanned_peak_bytes": 1, "unplanned_step_seconds": 1}
    return Plan(frontend="jax", gear="jit", fingerprint=recording.fingerprint, decisions=decisions, **facts)


def test_tags_are_found_with_their_bytes() -> None:
    recording = recorded(_tagged).recording
    assert set(recording.names) == {"hidden", "out"}
    from recoup.jax.export import named_bytes

    assert named_bytes(recording)["hidden"] == 4 * X.nbytes


def test_sites_have_the_names_of_scopes_and_collapse_over_layers() -> None:
    recording = recorded(_tagged).recording
    assert list(recording.names["hidden"]) == [f"layers.{layer}/tanh" for layer in range(4)]
    assert recording.graph.blocks == tuple(f"layers.{layer}" for layer in range(4))


@pytest.mark.newest
def test_a_plan_as_a_tensor_map_and_as_a_policy() -> None:
    recording = recorded(_tagged).recording
    plan = _by_hand(recording, hidden="recompute")
    assert recoup.jax.maxtext(recording, plan) == {"hidden": "remat", "out": "device"}
    under = jax.checkpoint(tagged, policy=recoup.jax.policy(recording, plan))
    assert recoup.jax.residual_bytes(under, WS, X) < recoup.jax.residual_bytes(tagged, WS, X)
    assert recoup.jax.residual_bytes(under, WS, X) >= 3 * X.nbytes


_UNKNOWN = "no value of the step is named 'hiden'; names in it: hidden, out"


@pytest.mark.parametrize(("names", "message"), [(["hiden"], _UNKNOWN), (["out", "out"], "twice")])
def test_a_misspelt_name_is_refused(names: list[str], message: str) -> None:
    recording = recorded(_tagged).recording
    with pytest.raises(UsageError, match=message):
        recoup.jax.maxtext(recording, _by_hand(recording), names)


def test_a_policy_needs_names() -> None:
    recording = recorded(losses.unrolled).recording
    with pytest.raises(UsageError, match="checkpoint_name"):
        recoup.jax.policy(recording, _by_hand(recording))


@pytest.mark.newest
def test_offloading_takes_what_comes_back_sooner() -> None:
    step = recorded(losses.attention)
    recording = step.recording
    plan = recoup.jax.solve(recording, int(unplanned_peak_bytes(recording) * 0.6))
    fast, slow = with_offload(recording, plan, Link(1e15)), with_offload(recording, plan, Link(1.0))
    assert slow == plan
    assert fast.offload_sites
    assert fast.offload_sites <= plan.recompute_sites
    assert fast.recompute_sites == plan.recompute_sites - fast.offload_sites
    assert fast.step_seconds < plan.step_seconds
    assert recoup.jax.maxtext(recording, fast) == {}
    _, verdicts = step.verified(fast)
    assert verdicts["values and gradients"].passed
    assert verdicts["residual bytes"].passed, verdicts["residual bytes"].detail


def test_a_link_has_a_bandwidth() -> None:
    with pytest.raises(UsageError, match="above 0"):
        Link(0.0)
