"""Names that last: the module path of an equation, from named scopes or else from the functions that wrote it.

``jax.named_scope`` and Flax name modules; where nothing is named, the functions of the user's files on the way to the equation
are. A path that is called several times gets the number of the call: ``block.attention.3``. ``layers_3`` reads ``layers.3``, so
that plans collapse over layers.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import recoup

__all__ = ["Namer", "module_of", "scope_of"]

OWN = "@"
_NO_MODULES = frozenset({"", "checkpoint", "rematted_computation"})
_WRAPPERS = re.compile(r"(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|jit|pjit)\(|\)")
_NUMBERED = re.compile(r"_([0-9]+)$")
_UNCLEAN = re.compile(r"[^\w.\-]+")
_DEEPEST = 4
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", "<string", "<shard_map")
_OWN = str(Path(recoup.__file__).parent)
_STANDARD = (str(Path(re.__file__).parent.parent), str(Path(jax.__file__).parent))


def module_of(eqn: Any) -> str:
    """The module path in an equation's name stack, freed of what JAX's transformations wrap around it."""
    parts = [part for part in _WRAPPERS.sub("", str(eqn.source_info.name_stack)).split("/") if part not in _NO_MODULES]
    # A path that Recoup wrote in an earlier pass is whole.
    own = [part for part in parts if part.startswith(OWN)]
    return own[-1].removeprefix(OWN) if own else ".".join(_clean(part) for part in parts)


def scope_of(path: str) -> AbstractContextManager[Any]:
    """The named scope that makes ``module_of`` say this path of all equations within."""
    return jax.named_scope(OWN + path)


def _clean(part: str) -> str:
    return _NUMBERED.sub(r".\1", _UNCLEAN.sub("-", part).strip("-."))


class Namer:
    """Names the equations of one trace, in order; call it with each equation and the path of what called it."""

    def __init__(self, root: str = "") -> None:
        self.root = root
        # How many calls a path has had, and which of its lines the present call has run.
        self.calls: dict[str, int] = {}
        self.seen: dict[str, set[tuple[str, int]]] = {}
        self.first: dict[str, str] = {}

    def __call__(self, eqn: Any, outer: str) -> str:
        """The path of an equation; ``outer`` is that of the call it stands in, '' for none."""
        own = module_of(eqn)
        if outer and outer != self.root:
            # Traces of inner functions are cached, so their frames may be those of another call.
            return outer if not own or own in outer else f"{outer}.{own}"
        functions, line = _frames(eqn)
        path = own or ".".join(functions)
        return ".".join(filter(None, (self.root, self._numbered(path, eqn.primitive.name, line))))

    def _numbered(self, path: str, primitive: str, line: int) -> str:
        if not path or (path[-1:].isdigit() and "." in path):
            return path
        seen = self.seen.setdefault(path, set())
        if (primitive, line) in seen and line:
            self.calls[path] = self.calls.get(path, 0) + 1
            seen.clear()
        seen.add((primitive, line))
        return f"{path}.{self.calls.get(path, 0)}"


def _frames(eqn: Any) -> tuple[list[str], int]:
    """Functions of the user's files from the loss down to the equation, and the line of the last."""
    traceback = eqn.source_info.traceback
    found: list[str] = []
    line = 0
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name.startswith(_OWN):
            # Frames come from the innermost out: what called Recoup is not part of the step.
            break
        if any(library in frame.file_name for library in _LIBRARIES) or frame.file_name.startswith(_STANDARD):
            continue
        line = line or frame.line_num
        parts = [part for part in frame.function_name.split(".") if part not in ("<locals>", "<lambda>", "__call__", "wrapper")]
        if parts:
            found.append(_clean(parts[-1]))
    names = [name for name in dict.fromkeys(reversed(found)) if name]
    return names[-_DEEPEST:], line
