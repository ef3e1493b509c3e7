"""The command line: ``recoup VERB train.py:workload``. One module per verb; data on stdout, messages on stderr.

Exit status: 0 done, 1 a fault, 2 wrong usage, 3 the answer is no (does not fit, verification failed), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from recoup.cli.console import Console
from recoup.cli.parser import build_parser
from recoup.errors import RecoupError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status; ``argv`` is without the program's name.

    Raises:
        SystemExit: by argparse, on ``--help``, ``--version`` and wrong arguments (status 2).
    """
    args = build_parser().parse_args(argv)
    console = Console(json=args.format == "json", quiet=args.quiet)
    try:
        status = args.run(args, console)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        console.error("interrupted")
        return 130
    except BrokenPipeError:
        # Who reads has gone, as with `| head`; nothing more can be said there, nor when Python closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RecoupError as error:
        console.error(str(error))
        _traceback(args.debug)
        return error.exit_status
    except Exception as error:
        hint = "" if args.debug else " (--debug shows where)"
        console.error(f"{type(error).__name__}: {error}{hint}")
        _traceback(args.debug)
        return 1


def _traceback(debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
