"""Reference workloads: small models of the families that people train, each with size knobs.

Every module here has ``workload(**sizes) -> (model, step)`` and ``TINY``, sizes whose step takes a few milliseconds.
``step()`` clears the gradients, runs forward and backward, and returns the detached loss; it has no optimizer.
Nothing is downloaded: weights are drawn from a seed, data is drawn, or lies in Python or in an installed package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from recoup.errors import UsageError

__all__ = ["WORKLOADS", "load"]

WORKLOADS: dict[str, str] = {
    name: f"{__name__}.{name}" for name in ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet", "unet", "lora", "chain", "text")
}


def load(name: str, tiny: bool = False, **sizes: Any) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and the step of a workload by name; ``sizes`` go over the default, or over the tiny, sizes.

    Raises:
        UsageError: no workload has that name.
        MissingExtra: the workload needs a package that is not installed.
    """
    if name not in WORKLOADS:
        raise UsageError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    module = importlib.import_module(WORKLOADS[name])
    return module.workload(**{**(module.TINY if tiny else {}), **sizes})
