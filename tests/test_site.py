from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.graph.site import collapse, expand, op_name, site_of


def test_sites_are_written() -> None:
    assert site_of("layers.0.mlp", 0, "gelu", 0) == "layers.0.mlp/gelu"
    assert site_of("layers.0.mlp", 2, "gelu", 1, 3) == "layers.0.mlp@2/gelu#1:3"
    assert site_of("", 0, "add.Tensor", 0) == "/add.Tensor"


def test_operation_names_lose_what_all_share() -> None:
    assert op_name("aten.addmm.default") == "addmm"
    assert op_name("aten.add.Tensor") == "add.Tensor"
    assert op_name("mine.op.default") == "mine.op"


def test_ranges_expand_in_order() -> None:
    assert expand("layers.[0-2,5].mlp/gelu") == tuple(f"layers.{layer}.mlp/gelu" for layer in (0, 1, 2, 5))
    assert expand("a.[0-1].b.[3-4]/x") == ("a.0.b.3/x", "a.0.b.4/x", "a.1.b.3/x", "a.1.b.4/x")
    assert expand("plain/op") == ("plain/op",)


@pytest.mark.parametrize("pattern", ["layers.[-]/x", "layers.[1-]/x", "layers.[,]/x"])
def test_malformed_ranges_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="malformed range"):
        expand(pattern)


def test_identical_layers_collapse() -> None:
    sites = [f"h.{layer}.mlp/gelu" for layer in range(12)] + ["head/mm"] + ["h.0.ln/norm", "h.2.ln/norm"]
    assert [pattern for pattern, _ in collapse(sites)] == ["h.[0-11].mlp/gelu", "head/mm", "h.[0,2].ln/norm"]


def test_a_range_may_run_over_outermost_numbers() -> None:
    assert [pattern for pattern, _ in collapse(["0/relu", "1/relu"])] == ["[0-1]/relu"]


PATHS = st.lists(st.sampled_from(["layers", "mlp", "0", "1", "7", "12", "attn"]), min_size=1, max_size=4).map(".".join)
SITES = st.builds(
    site_of, PATHS, st.integers(0, 2), st.sampled_from(["gelu", "add.Tensor", "mm"]), st.integers(0, 2), st.integers(0, 1)
)  # fmt: skip


@given(st.lists(SITES, unique=True, max_size=30))
def test_collapse_and_expand_are_inverse(sites: list[str]) -> None:
    groups = collapse(sites)
    assert [site for pattern, _ in groups for site in expand(pattern)] == [site for _, members in groups for site in members]
    assert sorted(site for _, members in groups for site in members) == sorted(sites)
