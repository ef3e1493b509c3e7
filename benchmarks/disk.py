"""The disk that a benchmark offloads to: its directory, and its link, measured now or before."""

from __future__ import annotations

import argparse
from pathlib import Path

from recoup.cli.offloading import read_links
from recoup.cost import OffloadLink
from recoup.errors import UsageError
from recoup.torch.offload.measure import measure_disk

__all__ = ["add_disk", "disk_link"]


def add_disk(parser: argparse.ArgumentParser) -> None:
    """The options that say which disk."""
    parser.add_argument("--offload-dir", type=Path, required=True, metavar="DIR", help="a directory on the disk to offload to")
    parser.add_argument(
        "--link", type=Path, metavar="LINKS.json", help="the link as 'recoup doctor --format json' wrote it, not measured now"
    )


def disk_link(options: argparse.Namespace) -> OffloadLink:
    """The link to the directory asked for.

    Raises:
        UsageError: the file has no link to a disk.
    """
    if options.link is None:
        return measure_disk(options.offload_dir)
    found = [one for one in read_links(str(options.link)) if one.target == "disk"]
    if not found:
        raise UsageError(f"{options.link} has no link to a disk")
    return found[0]
