"""Devices, the roofline and the links: laws, and that data says where it comes from."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.job_rows import read
from recoup.cost import attention_seconds, collective_seconds, device, device_names, matmul_seconds, memory_seconds
from recoup.cost.links import link_between
from recoup.errors import UsageError

A100, GB200 = device("a100"), device("gb200")
sizes = st.integers(1, 1 << 16)


@given(sizes, sizes, sizes)
def test_products_take_no_less_than_either_roof_and_grow(m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(A100, 1, m, n, k)
    assert seconds >= 2 * m * n * k / A100.flops.bf16
    assert seconds >= 2 * (m * k + k * n + m * n) / A100.memory_bytes_per_second
    assert matmul_seconds(A100, 1, 2 * m, n, k) > seconds
    assert matmul_seconds(A100, 1, m, n, k, accumulate=True) >= seconds
    assert matmul_seconds(A100, 2, m, n, k) <= 2 * seconds


@given(st.floats(1, 1e12), st.integers(1, 4))
def test_kernels_that_move_take_no_less_than_the_bandwidth(moved: float, kernels: int) -> None:
    assert memory_seconds(A100, moved, kernels) > moved / A100.memory_bytes_per_second
    assert memory_seconds(A100, moved, kernels) <= memory_seconds(A100, moved, kernels + 1)
    assert memory_seconds(A100, 0) == 0


@given(st.floats(1e9, 1e15), st.integers(1, 1 << 20))
def test_attention_by_rows_in_flight(flops: float, rows: int) -> None:
    seconds = attention_seconds(A100, flops, rows)
    assert seconds >= flops / A100.flops.bf16
    assert attention_seconds(A100, flops, 2 * rows) <= seconds
    assert attention_seconds(A100, flops, rows, share=0.5) >= seconds
    assert attention_seconds(A100, 0, rows) == 0


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]),
    st.floats(1e3, 1e10),
    st.sampled_from([1, 2, 4, 8, 16, 64]),
)
def test_collectives(kind: str, size: float, count: int) -> None:
    seconds = collective_seconds(A100, kind, size, count)
    if count == 1:
        assert seconds == 0
        return
    link = link_between(A100, count) if count > 8 else A100.links[0]
    assert seconds >= (count - 1) / count * size / max(link.bytes_per_second, A100.links[0].bytes_per_second)
    assert collective_seconds(A100, kind, 2 * size, count) > seconds
    assert collective_seconds(A100, "all_reduce", size, count) == pytest.approx(2 * collective_seconds(A100, "all_gather", size, count))


def test_groups_that_span_domains_pay_for_the_network() -> None:
    within, across = (collective_seconds(A100, "all_gather", 1e9, 8, stride) for stride in (1, 8))
    assert across > 4 * within
    # 72 devices lie in one domain of the larger rack.
    assert collective_seconds(GB200, "all_gather", 1e9, 64) < collective_seconds(A100, "all_gather", 1e9, 64) / 4
    # Two levels: over a hundred megabytes go through the network once, an eighth of them for each of eight devices.
    inner = collective_seconds(A100, "all_gather", 1e9, 8)
    outer = 1 / 2 * 1e9 / 8 / (25e9 * 0.8)
    assert collective_seconds(A100, "all_gather", 1e9, 16) == pytest.approx(inner + outer, rel=0.01)


def test_an_unknown_collective() -> None:
    with pytest.raises(UsageError, match="all_gather"):
        collective_seconds(A100, "gossip", 1, 2)


def test_rates_are_the_datasheets() -> None:
    for row in read("device_specs.csv"):
        found = device(row["device"].lower().removesuffix("-sxm"))
        assert found.flops.bf16 == pytest.approx(float(row["bf16_dense_tflops"]) * 1e12)
        assert found.memory_bytes_per_second == float(row["hbm_gb_s"]) * 1e9
        assert found.memory_bytes == pytest.approx(float(row["hbm_gb"]) * 1e9, rel=0.08)
        assert found.links[0].bytes_per_second == float(row["nvlink_gb_s_bidir"]) / 2 * 1e9


@pytest.mark.parametrize("name", device_names())
def test_every_number_says_where_it_comes_from(name: str) -> None:
    found = device(name)
    assert found.source
    for part in (found.matmul, found.attention, *found.links):
        assert part.provenance in ("measured", "fitted", "datasheet", "assumed")
        assert part.source
    assert 0 < found.matmul.ceiling <= 1
    assert 0 < found.memory_efficiency.ceiling <= 1
    assert found.reserved_bytes < found.memory_bytes


def test_a_device_passes_through_and_is_checked() -> None:
    assert device(A100) is A100
    with pytest.raises(UsageError, match="did you mean h100"):
        device("h10")
    with pytest.raises(UsageError, match="has no rate for 'fp8'; its field `flops` has bf16"):
        A100.rate("fp8")
    assert msgspec.json.decode(msgspec.json.encode(A100), type=type(A100)) == A100
