from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.units import Budget, format_bytes, format_seconds, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("6GiB", 6 * 2**30),
        ("6gib", 6 * 2**30),
        ("1.5g", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        ("512 MiB", 512 * 2**20),
        ("2K", 2048),
        ("2kB", 2000),
        ("1e3", 1000),
        ("0.5 TiB", 2**39),
        ("12 B", 12),
        (" 7 ", 7),
    ],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "6 XB", "-1", "6iB", "6 i", "1..5G", "nan", "1e999", "6GiB per step"])
def test_what_is_no_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_written_bytes_read_back_within_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(0, 2**60))
def test_a_whole_count_reads_back_exactly_up_to_what_floats_hold(count: int) -> None:
    assert parse_bytes(str(count)) == int(float(count))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 * 2**20, "10.0 MiB"), (600 * 2**20, "600 MiB"), (2**50, "1024 TiB")],
)
def test_bytes_are_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.00 us"), (2e-6, "2.00 us"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (1.0, "1.00 s"), (90, "90.0 s")]
)
def test_seconds_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_budgets_resolve() -> None:
    assert parse_budget("6GiB").resolve(1) == 6 * 2**30
    assert parse_budget(4096).resolve(1) == 4096
    assert parse_budget("60%").resolve(1000) == 600
    assert parse_budget("auto").resolve(1000, free_bytes=700) == 700
    budget = Budget("relative", 0.5, "50%")
    assert parse_budget(budget) is budget


def test_auto_needs_a_device_that_is_known() -> None:
    with pytest.raises(UsageError, match="free memory is known"):
        parse_budget("auto").resolve(1000)


@pytest.mark.parametrize("budget", ["-1", "0", "0%", "-5%", 0, -3])
def test_budgets_are_positive(budget: str | int) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        parse_budget(budget)


@pytest.mark.parametrize("budget", [True, 1.5, None])
def test_budgets_are_text_or_whole_numbers(budget: object) -> None:
    with pytest.raises(UsageError, match="text or a whole number"):
        parse_budget(budget)  # type: ignore[arg-type]
