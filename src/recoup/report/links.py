"""Measured links as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from recoup.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from recoup.cost import OffloadLink

__all__ = ["links_table"]


def links_table(links: Sequence[OffloadLink]) -> Table:
    """One row for each link: where to, its rates, and what a transfer costs besides."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("offload to")
    table.add_column("where")
    for name in ("write", "read", "latency", "call", "staging", "drag"):
        table.add_column(name, justify="right")
    for link in links:
        table.add_row(
            link.target,
            escape(link.where),
            f"{format_bytes(link.write_bytes_per_second)}/s",
            f"{format_bytes(link.read_bytes_per_second)}/s",
            format_seconds(link.latency_seconds),
            format_seconds(link.call_seconds),
            format_bytes(link.staging_bytes),
            f"{link.drag:.0%}",
        )
    return table
