"""Which session decides about the graphs that are being compiled: one at a time, opened around a compiled model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from recoup.torch.compiled.detect import original
from recoup.torch.compiled.interfaces import intercepted
from recoup.torch.compiled.session import Chooser, Session
from recoup.torch.naming import tensor_names

__all__ = ["active_session", "session_for"]

_active: list[Session] = []


def active_session() -> Session | None:
    """The innermost open session; Recoup's own backend asks it, and so does every graph that goes to Inductor."""
    return _active[-1] if _active else None


@contextmanager
def session_for(model: torch.nn.Module, chooser: Chooser) -> Generator[Session]:
    """A session that decides about every graph compiled while it is open; all are compiled anew, before and after."""
    session = Session(chooser, tensor_names([original(model)])())
    _active.append(session)
    try:
        with intercepted(session.handle):
            yield session
    finally:
        _active.remove(session)
