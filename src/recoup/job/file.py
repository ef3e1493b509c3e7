"""A job as a JSON file: model, layout, kernels, numbers and device; unknown fields are refused with their place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from recoup.cost.device import Device, device
from recoup.errors import UsageError
from recoup.job.job import Job
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.model import Model
from recoup.job.presets import preset

__all__ = ["JobFile", "changed", "load_job"]

_Fields = TypeVar("_Fields", Model, Layout, Kernels, Numbers)


class JobFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a job file holds.

    Attributes:
        model: a preset's name, or the sizes.
        layout: degrees, schedule and batches.
        device: a device's name, or one described in place.
        kernels: which kernels run.
        numbers: bytes of states, precision.
        fixed_bytes: context and workspaces on each device.
    """

    model: str | Model
    layout: Layout
    device: str | Device
    kernels: Kernels = Kernels()
    numbers: Numbers = Numbers()
    fixed_bytes: int = 0


def load_job(path: str | os.PathLike[str]) -> Job:
    """Reads a job file.

    Raises:
        UsageError: the file cannot be read, has a field that is wrong or unknown (the path of the field is in the message), or
            the layout does not split the model evenly.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=JobFile)
    except OSError as error:
        raise UsageError(f"cannot read the job {os.fspath(path)}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{os.fspath(path)} is no job: {error}") from error
    model = preset(found.model) if isinstance(found.model, str) else found.model
    return Job(model, found.layout, device(found.device), found.kernels, found.numbers, found.fixed_bytes)


def changed(fields: _Fields, changes: Mapping[str, object]) -> _Fields:
    """The same with some fields given as text or values.

    Raises:
        UsageError: a field is not known (the message lists those there are), or its value does not fit.
    """
    kind = type(fields).__name__.lower()
    known = fields.__struct_fields__
    for name in changes:
        if name not in known:
            raise UsageError(f"{kind} field `{name}` is not known; valid values: {', '.join(known)}")
    values = {name: getattr(fields, name) for name in known} | {name: _value(text) for name, text in changes.items()}
    try:
        return msgspec.convert(values, type=type(fields), strict=False)
    except msgspec.ValidationError as error:
        # What the fields' own checks say is told as it is; it names the field.
        raise UsageError(str(error.__cause__ or f"{kind} field: {error}")) from error


def _value(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
