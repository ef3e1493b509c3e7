"""Layers as step graphs: well formed, exact in bytes, and what a way costs adds up over layers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.cost import collective_seconds
from recoup.graph.rules import check
from recoup.job.dishes import NAMED, dish, dishes, named_dish, recomputed_by
from recoup.job.graph import layer_graph
from recoup.job.layer import layer_table
from recoup.job.layout import Kernels
from recoup.job.pricing import price_table
from recoup.job.shape import Shape
from recoup.simulate.judge import run
from tests.job.jobs import A100, gpt, shapes, stacked, table_of


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_graphs_are_well_formed_and_keep_what_the_table_says(shape: Shape) -> None:
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    check(layer.graph)
    plain = dish(layer, ())
    assert plain.kept_bytes == table.saved_bytes
    assert plain.added_seconds == 0
    assert named_dish(layer, "full").kept_bytes == table.entering.bytes
    assert layer.graph.ops[layer.pause].seconds == 0


@settings(max_examples=25, deadline=None)
@given(shapes(), st.integers(2, 4), st.data())
def test_bytes_of_stacked_layers_add_up(shape: Shape, count: int, data: st.DataObject) -> None:
    table = table_of(shape)
    prices = price_table(table, A100, shape, "bf16")
    layer = layer_graph(table, prices)
    leaving = table.rows[-1].makes[0].name
    names = data.draw(st.frozensets(st.sampled_from(sorted(name for name in layer.storages if name not in ("x", leaving)))))
    one = dish(layer, names)
    stack = layer_graph(*stacked(table, prices, count))
    dropped = frozenset(stack.storages[f"{name}_{place}"] for name in names for place in range(count))
    found = run(stack.graph, dropped)
    assert int(found.bytes_at[stack.pause]) == count * one.kept_bytes
    assert int(found.bytes_at[stack.pause :].max()) <= count * one.kept_bytes + one.working_bytes
    # In the last layer's backward all others stand, so the bound is reached there but for what the layer itself lets go of.
    assert int(found.bytes_at.max()) >= (count - 1) * one.kept_bytes + one.working_bytes
    seconds = sum(stack.graph.ops[op].seconds for op in found.replayed.ops)
    assert seconds == pytest.approx(count * one.replay_seconds)


@settings(max_examples=15, deadline=None)
@given(shapes(), st.integers(1, 3), st.integers(2, 3), st.data())
def test_bytes_of_micro_batches_in_flight_add_up(shape: Shape, count: int, batches: int, data: st.DataObject) -> None:
    """The formula of a stage, ``held * count * kept + working``, against one simulation of all that is in flight there."""
    table = table_of(shape)
    prices = price_table(table, A100, shape, "bf16")
    layer = layer_graph(table, prices)
    leaving = table.rows[-1].makes[0].name
    names = data.draw(st.frozensets(st.sampled_from(sorted(name for name in layer.storages if name not in ("x", leaving)))))
    one = dish(layer, names)
    stack = layer_graph(*stacked(table, prices, count, batches))
    found = run(stack.graph, frozenset(stack.storages[f"{name}_{place}"] for name in names for place in range(count * batches)))
    assert int(found.bytes_at[stack.pause]) == batches * count * one.kept_bytes
    # The simulation lets the words of later micro-batches and the gradients that leave the stage stand to its end.
    spare = batches * table.entering.bytes
    assert int(found.bytes_at[stack.pause :].max()) <= batches * count * one.kept_bytes + one.working_bytes + spare
    assert int(found.bytes_at.max()) >= (batches * count - 1) * one.kept_bytes + one.working_bytes


@settings(max_examples=20, deadline=None)
@given(shapes())
def test_a_menu_has_no_way_that_another_beats_and_covers_the_named_ones(shape: Shape) -> None:
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    menu = dishes(layer)
    figures = [(way.added_seconds, way.kept_bytes, way.working_bytes) for way in menu]
    for one in figures:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in figures)
    for name in NAMED:
        way = named_dish(layer, name)
        named = (way.added_seconds, way.kept_bytes, way.working_bytes)
        assert any(all(a <= b for a, b in zip(one, named, strict=True)) for one in figures)


def test_selective_saves_nothing_under_fused_attention() -> None:
    table = layer_table(Shape(gpt(), Kernels(attention="flash"), 1, False, 1, 1, 1, 1, 128), "dense")
    assert recomputed_by(table, "selective") == frozenset()
    explicit = layer_table(Shape(gpt(), Kernels(attention="explicit"), 1, False, 1, 1, 1, 1, 128), "dense")
    assert recomputed_by(explicit, "selective") == {"scores", "probs", "dropped", "mask"}


def test_full_as_trainers_run_it_replays_the_whole_layer_and_a_block_stops_early() -> None:
    shape = Shape(gpt(hidden_dropout=False), Kernels(), 1, False, 1, 1, 1, 1, 128)
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    full, block = named_dish(layer, "full"), named_dish(layer, "block")
    assert full.replay_seconds == pytest.approx(layer.prices.forward_seconds)
    prices = {row.name: price.forward_seconds for row, price in zip(table.rows, layer.prices.rows, strict=True)}
    # The last product and the sum after it make nothing that the backward reads.
    assert block.replay_seconds == pytest.approx(full.replay_seconds - prices["down"] - prices["y"])
    assert block.working_bytes == full.working_bytes > named_dish(layer, "none").working_bytes


def test_offloading_hides_behind_compute_or_is_charged() -> None:
    shape = Shape(gpt(hidden=1024, heads=8), Kernels(), 1, False, 1, 1, 1, 1, 128)
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    slow = [way for way in dishes(layer, host_bytes_per_second=1e9) if way.offload]
    fast = [way for way in dishes(layer, host_bytes_per_second=1e14) if way.offload]
    assert fast
    assert all(way.wait_seconds == 0 for way in fast if not way.recompute)
    assert min(way.kept_bytes for way in fast) == 0
    for way in slow:
        size = sum(table.tensors[name].bytes for name in way.offload)
        assert way.offload_bytes == size
        over = max(size / 1e9 - layer.prices.forward_seconds, 0)
        over += max(size / 1e9 - layer.prices.backward_seconds - way.replay_seconds, 0)
        assert way.wait_seconds == pytest.approx(over)


def test_recomputation_behind_collectives_is_charged_for_what_does_not_hide() -> None:
    shape = Shape(gpt(hidden=512, heads=8), Kernels(attention="explicit"), 4, True, 1, 1, 1, 1, 128)
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    # By hand: gathers before the row-split layers run behind nothing, those of the column-split ones behind the data gradient,
    # reductions behind nothing if gradients of weights go elsewhere.
    whole = collective_seconds(A100, "all_gather", shape.whole_bytes, 4)
    covered = [price.data_seconds for row, price in zip(table.rows, layer.prices.rows, strict=True) if len(row.returns) == 2]
    window = 2 * whole + sum(whole + max(whole - 0.8 * data, 0) for data in covered) - layer.prices.weight_seconds
    assert layer.prices.window_seconds == pytest.approx(max(window, 0.0))
    for name in ("selective", "full"):
        open_, hidden = named_dish(layer, name), named_dish(layer, name, hide=True)
        assert hidden.added_seconds == pytest.approx(max(0.0, open_.replay_seconds - max(window, 0.0)))


def test_a_slow_link_hides_recomputation() -> None:
    slow = msgspec.structs.replace(A100, links=tuple(msgspec.structs.replace(link, bytes_per_second=1e9) for link in A100.links))
    shape = Shape(gpt(hidden=512, heads=8), Kernels(attention="explicit"), 4, True, 1, 1, 1, 1, 128)
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, slow, shape, "bf16"))
    assert layer.prices.window_seconds > named_dish(layer, "selective").replay_seconds > 0
    assert named_dish(layer, "selective", hide=True).added_seconds == 0


def test_a_menu_holds_the_best_answer_to_every_price_of_a_byte() -> None:
    """Against every set of tensors that a small layer can recompute."""
    shape = Shape(gpt(hidden_dropout=False, attention_dropout=False), Kernels(), 1, False, 1, 1, 1, 1, 128)
    table = table_of(shape)
    layer = layer_graph(table, price_table(table, A100, shape, "bf16"))
    # What nobody saves costs bytes only if it is kept on purpose: of these the residual sum's summand is the one worth trying.
    free = [name for name in table.saved if name != "x"]
    unsaved = [tensor.name for row in table.rows for tensor in row.makes if tensor.name not in table.saved]
    assert len(free) == 10
    every = [
        dish(layer, [*(name for place, name in enumerate(free) if bits >> place & 1), *(name for name in unsaved if bits)])
        for bits in range(1 << len(free))
    ]
    menu = dishes(layer)
    rates = [one.added_seconds / (every[0].kept_bytes - one.kept_bytes) for one in every if one.kept_bytes < every[0].kept_bytes]
    for price in (min(rates) * 1.5, sorted(rates)[len(rates) // 4], sorted(rates)[len(rates) // 2], max(rates) * 2):
        least = min(one.added_seconds + price * one.kept_bytes for one in every)
        found = min(one.added_seconds + price * one.kept_bytes for one in menu)
        assert found <= least * (1 + 1e-3), price
