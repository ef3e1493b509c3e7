"""What all figures share: matplotlib without a display, and a file with an error that people understand."""

from __future__ import annotations

import os
from typing import Any

from recoup.errors import MissingExtra, UsageError

__all__ = ["figure_class", "save_figure"]

_DPI = 200


def figure_class() -> Any:
    """The class of figures.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        # Without pyplot there is no display, no global state and nothing to close.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib; install it with: pip install 'recoup[report]'") from error
    return Figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure, in the format of the path's suffix.

    Raises:
        UsageError: the suffix is not known, or the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except ValueError as error:
        raise UsageError(f"cannot draw into {path}: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
