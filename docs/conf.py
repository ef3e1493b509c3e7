"""Sphinx configuration: Markdown pages (MyST) with the furo theme. Build with ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from recoup import __version__

project = "Recoup"
author = "The Recoup contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Recoup {release}"
nitpicky = True
