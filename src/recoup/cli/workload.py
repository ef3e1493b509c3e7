"""Loads ``FILE.py:FUNCTION``, calls it with the sizes of ``--set``, and checks what it returns."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from recoup.errors import CaptureError, MissingExtra, RecoupError, UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["JaxWorkload", "Workload", "any_workload", "load_workload", "parse_sizes"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its step, as the user's file made them.

    Attributes:
        name: the file's name without ``.py``.
        model: the module that computes the loss.
        step: runs one forward and backward pass.
    """

    name: str
    model: nn.Module
    step: Callable[[], object]


@dataclass(frozen=True, slots=True)
class JaxWorkload:
    """A loss and its arguments, as the user's file made them.

    Attributes:
        name: the file's name without ``.py``.
        loss: a function to a scalar.
        args: its positional arguments.
        options: what ``recoup.jax.record`` takes beside them: ``argnums``, ``has_aux``, ``static_argnames``, ``kwargs``.
    """

    name: str
    loss: Callable[..., object]
    args: tuple[Any, ...]
    options: dict[str, Any]


def parse_sizes(texts: Sequence[str]) -> dict[str, Any]:
    """``["layers=24", "data=digits"]`` as ``{"layers": 24, "data": "digits"}``; what is no Python literal is text.

    Raises:
        UsageError: an entry is not NAME=VALUE.
    """
    sizes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set takes NAME=VALUE, such as --set layers=24, not {text!r}")
        try:
            sizes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            sizes[name] = value
    return sizes


def load_workload(source: str, settings: Sequence[str] = ()) -> Workload:
    """The model and step that a workload function returns; as ``any_workload``, but for PyTorch alone.

    Raises:
        UsageError: it returns a loss and arguments instead.
    """
    workload = any_workload(source, settings)
    if isinstance(workload, JaxWorkload):
        raise UsageError(f"{source} returns a loss and arguments, a JAX step; this verb runs PyTorch steps: (model, step)")
    return workload


def any_workload(source: str, settings: Sequence[str] = ()) -> Workload | JaxWorkload:
    """What a workload function returns: (model, step) of PyTorch, or (loss, args) or (loss, args, options) of JAX.

    Args:
        source: ``FILE.py:FUNCTION``.
        settings: ``NAME=VALUE`` texts, passed as keyword arguments.

    Raises:
        UsageError: the file or function is not there, the file does not load, a size is not one of the function's, or
            the function does not return a model and a callable.
        CaptureError: the function itself failed.
    """
    path, name = _split(source)
    sizes = parse_sizes(settings)
    with _importable(path.parent):
        function = _function(_load(path), path, name)
        _check_sizes(function, sizes, source)
        try:
            made = function(**sizes)
        except RecoupError:
            raise
        except Exception as error:
            raise CaptureError(f"{source} failed to make its model: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], tuple):
        return _checked_jax(path.stem, made, source)
    model, step = _checked(made, source)
    return Workload(path.stem, model, step)


def _split(source: str) -> tuple[Path, str]:
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        raise UsageError(f"a workload is written FILE.py:FUNCTION, such as train.py:workload, not {source!r}")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"no file {path}")
    return path.resolve(), name


@contextmanager
def _importable(folder: Path) -> Generator[None]:
    # As if Python had been started on the file: its neighbours can be imported.
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _load(path: Path) -> ModuleType:
    # Not under its own name, which might be that of an installed package.
    spec = importlib.util.spec_from_file_location(f"recoup_workload_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except RecoupError:
        raise
    except Exception as error:
        del sys.modules[spec.name]
        raise UsageError(f"{path} does not load: {type(error).__name__}: {error}") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise UsageError(f"{name} in {path} is no function but of type {type(function).__name__}")
    own = (key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__)
    there = ", ".join(key for key in own if not key.startswith("_"))
    raise UsageError(f"no function {name} in {path}" + (f"; there is {there}" if there else ""))


def _check_sizes(function: Callable[..., Any], sizes: dict[str, Any], source: str) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**sizes)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "nothing"
        raise UsageError(f"{source} cannot be called with these sizes: {error}; it takes {takes}") from error


_JAX_OPTIONS = frozenset({"argnums", "has_aux", "static_argnames", "kwargs"})


def _checked_jax(name: str, made: tuple[Any, ...], source: str) -> JaxWorkload:
    if importlib.util.find_spec("jax") is None:
        raise MissingExtra("running a workload of a loss and arguments needs JAX; install it with: pip install 'recoup[jax]'")
    options = made[2] if len(made) == 3 else {}
    if not isinstance(options, dict) or options.keys() - _JAX_OPTIONS:
        raise UsageError(f"{source} may return (loss, args, options), options a dictionary of {', '.join(sorted(_JAX_OPTIONS))}")
    return JaxWorkload(name, made[0], made[1], options)


def _checked(made: object, source: str) -> tuple[nn.Module, Callable[[], object]]:
    try:
        from torch import nn
    except ImportError as error:
        raise MissingExtra("running a workload needs PyTorch; install it with: pip install 'recoup[torch]'") from error
    if not isinstance(made, tuple) or len(made) != 2:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{source} must return (model, step), but returned {got}; a JAX step is (loss, args)")
    model, step = made
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source} must return (model, step), model a torch.nn.Module, but it is a {type(model).__name__}")
    if not callable(step):
        raise UsageError(f"{source} must return (model, step), step a callable, but it is a {type(step).__name__}")
    return model, step
