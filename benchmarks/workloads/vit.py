"""ViT from ``transformers``: image patches through an encoder; on noise, or on the handwritten digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

from recoup.errors import MissingExtra, UsageError

__all__ = ["TINY", "digits", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "image": 16, "patch": 4, "batch": 2}


def digits(batch: int, image: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first handwritten digits that ship inside scikit-learn: images ``[batch, 1, image, image]`` in 0..1, labels ``[batch]``.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("data='digits' reads the digits that ship with scikit-learn: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    if batch > len(labels):
        raise UsageError(f"scikit-learn ships {len(labels)} digits, fewer than batch={batch}")
    images = torch.tensor(pixels[:batch], dtype=torch.float32).view(batch, 1, 8, 8) / 16
    return torch.nn.functional.interpolate(images, size=(image, image), mode="bilinear"), torch.tensor(labels[:batch])


def workload(
    *,
    layers: int = 8,
    width: int = 192,
    heads: int = 4,
    image: int = 32,
    patch: int = 4,
    batch: int = 32,
    dropout: float = 0.1,
    data: str = "noise",
    attention: str = "sdpa",
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A ViT and its training step, ten classes.

    Args:
        layers: encoder blocks.
        width: features of a patch.
        heads: attention heads; must divide ``width``.
        image: pixels of an image's side.
        patch: pixels of a patch's side; must divide ``image``.
        batch: images of one step.
        dropout: of hidden features; attention has none, so that ``sdpa`` keeps no matrix.
        data: ``noise`` or ``digits`` (real images, needs scikit-learn).
        attention: ``sdpa`` or ``eager``.
        seed: of the weights and of the noise.

    Raises:
        UsageError: ``data`` is neither, or more digits are asked for than there are.
        MissingExtra: ``data`` is ``digits`` and scikit-learn is not installed.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    if data == "noise":
        pixels, labels = torch.randn(batch, 1, image, image, generator=generator), torch.randint(10, (batch,), generator=generator)
    elif data == "digits":
        pixels, labels = digits(batch, image)
    else:
        raise UsageError(f"data must be 'noise' or 'digits', not {data!r}")
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention, "num_labels": 10}
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=patch,
        num_channels=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
        **common,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViTForImageClassification(config).train()

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        return loss.detach()

    return model, step
