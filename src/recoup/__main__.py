"""``python -m recoup`` is the command line."""

from __future__ import annotations

import sys

from recoup.cli import main

if __name__ == "__main__":
    sys.exit(main())
