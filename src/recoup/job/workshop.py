"""What one layer costs and may do on one device: made once for each shape, however many layouts ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recoup.cost.device import Device
from recoup.job.dishes import Dish, dishes, named_dish
from recoup.job.graph import LayerGraph, layer_graph
from recoup.job.layer import head_table, input_table, layer_table
from recoup.job.pricing import Prices, price_table
from recoup.job.shape import Shape
from recoup.job.table import Table

__all__ = ["End", "end_of", "layer_of", "menu_of", "recipe_of"]

_SHAPES = 1 << 14


@dataclass(frozen=True, slots=True)
class End:
    """One end of the model: its table and prices.

    Attributes:
        table: its operations.
        forward_seconds: of one micro-batch.
        data_seconds: of its backward, all but gradients of weights.
        weight_seconds: gradients of weights.
        flops: of forward and backward, by the usual count.
    """

    table: Table
    forward_seconds: float
    data_seconds: float
    weight_seconds: float
    flops: int


@lru_cache(maxsize=_SHAPES)
def layer_of(shape: Shape, kind: str, device: Device, precision: str) -> LayerGraph:
    """The priced step graph of a layer."""
    table = layer_table(shape, kind)
    return layer_graph(table, price_table(table, device, shape, precision), f"{kind}")


@lru_cache(maxsize=_SHAPES)
def menu_of(shape: Shape, kind: str, device: Device, precision: str) -> tuple[Dish, ...]:
    """The ways to run a layer."""
    rate = device.host_bytes_per_second if shape.kernels.offload else 0.0
    return dishes(layer_of(shape, kind, device, precision), hide=shape.kernels.hide_recompute, host_bytes_per_second=rate)


@lru_cache(maxsize=_SHAPES)
def recipe_of(shape: Shape, kind: str, device: Device, precision: str, recipe: str) -> Dish:
    """A named recipe for a layer."""
    return named_dish(layer_of(shape, kind, device, precision), recipe, hide=shape.kernels.hide_recompute)


@lru_cache(maxsize=_SHAPES)
def end_of(shape: Shape, which: str, device: Device) -> End:
    """The ``input`` or the ``head`` of the model; both compute in bf16."""
    table = input_table(shape) if which == "input" else head_table(shape)
    prices: Prices = price_table(table, device, shape, "bf16")
    return End(
        table, prices.forward_seconds, prices.backward_seconds - prices.weight_seconds, prices.weight_seconds,
        table.flops + table.backward_flops,
    )  # fmt: skip
