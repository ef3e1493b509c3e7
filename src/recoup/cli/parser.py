"""The arguments of the command line; no verb's work is imported before it runs."""

from __future__ import annotations

import argparse

from recoup import __version__
from recoup.cli import doctor, fit, frontier, job, longest, record, show, solve, verify

__all__ = ["build_parser"]

_VERBS = (record, solve, frontier, fit, longest, job, verify, show, doctor)
_EPILOG = """\
A workload is a function in a Python file, FILE.py:FUNCTION, that returns (model, step): the torch.nn.Module and a callable
of no arguments that runs one forward and backward pass; or, for JAX, (loss, args): a function to a scalar and a tuple of its
arguments. --set NAME=VALUE passes it a size.

exit status: 0 done, 1 a fault, 2 wrong usage, 3 the answer is no (does not fit, verification failed)
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``recoup``; the parsed arguments carry the verb's function as ``run``."""
    parser = argparse.ArgumentParser(
        prog="recoup",
        description="Plans the activation memory of PyTorch training steps.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recoup {__version__}")
    _add_output_options(parser, {"format": "text", "quiet": False, "debug": False})
    # The same options after the verb; left out there, they must not overwrite what stood before it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_output_options(common, {})
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in _VERBS:
        name = verb.__name__.rpartition(".")[2]
        summary = (verb.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")
        added = verbs.add_parser(name, parents=[common], help=summary, description=summary[:1].upper() + summary[1:] + ".")
        verb.configure(added)
        added.set_defaults(run=verb.run)
    return parser


def _add_output_options(parser: argparse.ArgumentParser, defaults: dict[str, object]) -> None:
    shared = parser.add_argument_group("output")
    shared.add_argument("--format", choices=("text", "json"), help="form of the data on stdout (default: text)")
    shared.add_argument("--quiet", "-q", action="store_const", const=True, help="no messages and no progress on stderr")
    shared.add_argument("--debug", action="store_const", const=True, help="show the traceback of an error")
    parser.set_defaults(**defaults)
