"""``--offload`` and the budgets that go with it, for verbs that solve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from recoup.errors import UsageError
from recoup.units import parse_bytes

if TYPE_CHECKING:
    from recoup.cli.console import Console
    from recoup.cli.workload import Workload
    from recoup.cost import OffloadLink

__all__ = ["add_offload", "check_offload", "links_for", "read_links", "refuse_offload", "wanted_of"]

_WRITE_ONE = "write one with 'recoup doctor --offload-dir DIR --format json'"


def add_offload(parser: argparse.ArgumentParser) -> None:
    """``--offload``, ``--host-budget`` and ``--disk-budget``."""
    parser.add_argument(
        "--offload", action="append", default=[], metavar="host|disk:DIR|LINKS.json",
        help="let activations wait in the host's memory or on a disk, over a link measured now or by 'doctor --offload-dir' (repeatable)",
    )  # fmt: skip
    parser.add_argument("--host-budget", metavar="BYTES", help="the most that may wait in the host's memory, such as 16GiB")
    parser.add_argument("--disk-budget", metavar="BYTES", help="the most that may wait on disk")


def check_offload(args: argparse.Namespace) -> None:
    """Refuses before the work what would fail after it.

    Raises:
        UsageError: an amount or a target is malformed, a directory or file of links is not there, or there is a budget and no target.
    """
    for text in (args.host_budget, args.disk_budget):
        if text is not None:
            parse_bytes(text)
    if not args.offload and (args.host_budget or args.disk_budget):
        raise UsageError("--host-budget and --disk-budget limit what --offload moves; give it too")
    for wanted in args.offload:
        if wanted.endswith(".json"):
            read_links(wanted)
        elif wanted != "host" and not (wanted.startswith("disk:") and Path(wanted.removeprefix("disk:")).is_dir()):
            raise UsageError(f"--offload takes host, disk:DIRECTORY (one that exists) or a file of links, not {wanted!r}")


def wanted_of(args: argparse.Namespace) -> list[str | OffloadLink]:
    """What the arguments name: targets, and the links of files."""
    files = [wanted for wanted in args.offload if wanted.endswith(".json")]
    return [*(wanted for wanted in args.offload if wanted not in files), *(link for path in files for link in read_links(path))]


def links_for(args: argparse.Namespace, console: Console, workload: Workload | None) -> tuple[OffloadLink, ...]:
    """The links that the arguments name; those that are not in a file are measured."""
    wanted = wanted_of(args)
    if not wanted:
        return ()
    from recoup.torch.meter import device_of
    from recoup.torch.offload.links import links_of

    if any(isinstance(one, str) for one in wanted):
        console.message(f"Measuring {', '.join(one for one in wanted if isinstance(one, str))}")
    return links_of(wanted, "cpu" if workload is None else device_of(workload.model))


def refuse_offload(args: argparse.Namespace) -> None:
    """For JAX, whose plans offload by an argument of ``recoup.jax.solve``.

    Raises:
        UsageError: offloading is asked for.
    """
    if args.offload:
        raise UsageError("--offload plans for PyTorch; for JAX give recoup.jax.solve a link")


def read_links(path: str) -> list[OffloadLink]:
    """The links in a file that ``recoup doctor`` wrote.

    Raises:
        UsageError: it holds none.
    """
    import msgspec

    from recoup.cost import OffloadLink
    from recoup.graph.store import read_file

    data = read_file(path)
    try:
        facts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])  # what doctor writes has more fields
        links = msgspec.json.decode(facts.get("links", b"[]"), type=list[OffloadLink])
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no file of links: {error}; {_WRITE_ONE}") from error
    if not links:
        raise UsageError(f"{path} has no links; {_WRITE_ONE}")
    return links
