"""Transfers as nodes of compiled graphs: three operators, and what stands behind them when the graphs run.

``recoup::put(x, site)`` in the forward sends the storage of ``x`` on its way and returns a *token*, an empty tensor that autograd
saves in place of ``x``. ``recoup::fetch(token, ...)`` in the backward makes ``x`` again. ``recoup::prefetch(token)`` begins to fetch
ahead; the first fetch takes its result, so that no pass drops it. All are functional: what orders them is data.

They stand in graphs that were split already, behind autograd; tokens are integers, so that no gradient can go through one. A token is
known by its storage: as long as autograd holds that, what it stands for can be fetched, once for each backward pass; when autograd
lets go of it, the space is given back.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import torch
from torch import Tensor

from recoup.errors import OffloadError
from recoup.torch.compiled.step import site_in
from recoup.torch.offload.inbox import Inbox
from recoup.torch.offload.outbox import Moved
from recoup.torch.rebuild import is_quiet, replaying
from recoup.torch.views import Layout, lay, layout_of

__all__ = ["begin_call", "empty_token", "fetch", "prefetch", "put"]

_LIBRARY = torch.library.Library("recoup", "DEF")
_EXACT = (torch.Tag.needs_exact_strides,)
_LIBRARY.define("put(Tensor x, str site) -> Tensor", tags=_EXACT)
_LIBRARY.define("fetch(Tensor token, Tensor? after, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor", tags=_EXACT)
_LIBRARY.define("prefetch(Tensor token) -> Tensor", tags=_EXACT)

put = torch.ops.recoup.put.default
fetch = torch.ops.recoup.fetch.default
prefetch = torch.ops.recoup.prefetch.default


class _Call(threading.local):
    """The call of a compiled graph that this thread is in: where its storages go, and its label."""

    inbox: weakref.ref[Inbox] | None = None
    prefix: str = ""
    turn: int = 0


_call = _Call()
# What each token stands for, by the token's storage.
_moved: dict[int, tuple[Moved, Layout, weakref.ref[torch.UntypedStorage]]] = {}


def begin_call(inbox: Inbox, prefix: str, turn: int) -> None:
    """The next compiled forward of this thread sends its storages through ``inbox``, and is that with this label."""
    _call.inbox = weakref.ref(inbox)
    _call.prefix, _call.turn = prefix, turn


def empty_token() -> Tensor:
    """A token that stands for nothing yet. It has no bytes, so that no plan need count it."""
    return torch.empty(0, dtype=torch.uint8)


def _put(x: Tensor, site: str) -> Tensor:
    inbox = _call.inbox() if _call.inbox is not None else None
    if inbox is None:
        raise OffloadError(f"{site} is to be offloaded, but the plan that says where to is no longer applied; call the compiled model anew")
    with nullcontext() if is_quiet() else replaying():
        moved = Moved(inbox, site_in(site, _call.prefix, _call.turn), x)
        moved.put(x)
        token = empty_token()
        storage = token.untyped_storage()
        key = storage._cdata
        _moved[key] = moved, layout_of(x), weakref.ref(storage, lambda _: _moved.pop(key, None) and None)
        return token


def _fetch(token: Tensor, after: Tensor | None, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    moved, layout = _behind(token)
    assert list(layout.size) == list(size)
    with nullcontext() if is_quiet() else replaying():
        base = moved.inbox.take(moved)
        moved.inbox.fetch_ahead()
        return lay(base, layout)


def _prefetch(token: Tensor) -> Tensor:
    _behind(token)[0].inbox.fetch_ahead()
    return empty_token()


def _behind(token: Tensor) -> tuple[Moved, Layout]:
    found = _moved.get(token.untyped_storage()._cdata)
    if found is None:
        raise OffloadError(
            "an offloaded activation is asked for by a copy of its token: saved-tensor hooks around a compiled model that offloads must"
            " hand back the very tensors that they were given; leave them out, or plan without offloading. No weight was touched"
        )
    return found[0], found[1]


def _fetch_example(
    token: Tensor, after: Tensor | None, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_LIBRARY.impl("put", _put, "CompositeExplicitAutograd")
_LIBRARY.impl("fetch", _fetch, "CompositeExplicitAutograd")
_LIBRARY.impl("prefetch", _prefetch, "CompositeExplicitAutograd")
torch.library.register_fake("recoup::put", lambda x, site: empty_token(), lib=_LIBRARY)
torch.library.register_fake("recoup::fetch", _fetch_example, lib=_LIBRARY)
torch.library.register_fake("recoup::prefetch", lambda token: empty_token(), lib=_LIBRARY)
