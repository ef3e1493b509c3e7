from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given

import graphs
from recoup.graph import Op, Ref, Save, StepGraph, Storage, View
from recoup.graph.peak import alive_bytes, peak_bytes, peak_op
from recoup.graph.rules import RuleViolation, check, extent_bytes, itemsize, violations
from recoup.graph.text import print_graph

replace = msgspec.structs.replace


def flat(storage: int, version: int = 0, count: int = 25) -> Ref:
    return Ref(storage, version, View((count,), (1,), 0, "float32"))


def small_graph() -> StepGraph:
    """y = relu_(w * x), z = sum(y); backward of z gives the gradient of w. Ops 0-2 forward, 3-4 backward."""
    storages = (
        Storage(id=0, bytes=100, kind="parameter", site="w", dies=5, unheld_dies=5),
        Storage(id=1, bytes=100, kind="input", dies=5, unheld_dies=5),
        Storage(id=2, bytes=100, kind="activation", site="a/mul", producer=0, born=0, writes=(1,), dies=4, unheld_dies=3, replayable=""),
        Storage(id=3, bytes=4, kind="activation", site="/sum", producer=2, born=2, dies=5, unheld_dies=5, replayable="a decision"),
        Storage(id=4, bytes=100, kind="gradient", site="", producer=3, born=3, dies=5, unheld_dies=5),
        Storage(id=5, bytes=100, kind="gradient", site="w", producer=4, born=4, dies=5, unheld_dies=5),
    )
    ops = (
        Op(id=0, site="a/mul", target="aten.mul.Tensor", inputs=(flat(0), flat(1)), outputs=(flat(2),), seconds=2e-3, module="a"),
        Op(id=1, site="a/relu_", target="aten.relu_.default", inputs=(flat(2),), outputs=(flat(2, 1),), mutates=(2,), module="a"),
        Op(
            id=2,
            site="/sum",
            target="aten.sum.default",
            inputs=(flat(2, 1),),
            outputs=(flat(3, 0, 1),),
            constants=("dtype=None",),
            scratch_bytes=50,
        ),
        Op(id=3, site="a/backward", target="aten.threshold_backward.default", inputs=(flat(2, 1),), outputs=(flat(4),), phase="backward"),
        Op(
            id=4, site="a/mul#1", target="aten.mul.Tensor", inputs=(flat(4), flat(1)), outputs=(flat(5),), phase="backward", flags=("sync",)
        ),
    )
    saves = (
        Save(ref=flat(1), packed_at=0, unpacked_at=(4,), released_at=5),
        Save(ref=flat(2, 1), packed_at=2, unpacked_at=(3,), released_at=4),
    )
    return StepGraph(ops=ops, storages=storages, saves=saves, unpack_order=(1, 0), backwards=(3,), name="small", step_seconds=0.01)


def op_with(graph: StepGraph, place: int, **changes: Any) -> StepGraph:
    return replace(graph, ops=tuple(replace(op, **changes) if op.id == place else op for op in graph.ops))


def storage_with(graph: StepGraph, place: int, **changes: Any) -> StepGraph:
    return replace(graph, storages=tuple(replace(item, **changes) if item.id == place else item for item in graph.storages))


def save_with(graph: StepGraph, place: int, **changes: Any) -> StepGraph:
    return replace(graph, saves=tuple(replace(save, **changes) if index == place else save for index, save in enumerate(graph.saves)))


def test_the_small_graph_is_well_formed() -> None:
    check(small_graph())


@pytest.mark.parametrize(
    "graph",
    [graphs.chain(), graphs.shared_input(), graphs.multi_output(), graphs.inplace_chain(), graphs.unsaved_leaf(), graphs.transformer(2)],
    ids=lambda graph: graph.name,
)
def test_the_shared_graphs_are_well_formed(graph: StepGraph) -> None:
    check(graph)


@given(graphs.step_graphs())
def test_random_graphs_are_well_formed(graph: StepGraph) -> None:
    check(graph)


BROKEN = [
    ("ids are positions", op_with(small_graph(), 1, id=7)),
    ("ids are positions", storage_with(small_graph(), 1, id=7)),
    ("references exist", op_with(small_graph(), 2, inputs=(flat(9),))),
    ("references exist", op_with(small_graph(), 2, mutates=(-1,))),
    ("references exist", storage_with(small_graph(), 2, writes=(5,))),
    ("references exist", storage_with(small_graph(), 2, producer=-1)),
    ("references exist", save_with(small_graph(), 0, ref=flat(6))),
    ("references exist", replace(small_graph(), unpack_order=(1, 2))),
    ("operation sites are unique", op_with(small_graph(), 4, site="a/mul")),
    ("activation sites are unique", storage_with(small_graph(), 3, site="a/mul")),
    ("backward passes begin in order, within the step", replace(small_graph(), backwards=(3, 2))),
    ("backward passes begin in order, within the step", replace(small_graph(), backwards=(6,))),
    ("amounts are not negative", op_with(small_graph(), 0, seconds=-1.0)),
    ("amounts are not negative", op_with(small_graph(), 0, scratch_bytes=-1)),
    ("amounts are not negative", storage_with(small_graph(), 4, bytes=-1)),
    ("flags are known", op_with(small_graph(), 0, flags=("rnadom",))),
    ("outputs are the version that stands", op_with(small_graph(), 1, outputs=(flat(2, 0),))),
    ("nothing is read before it is written", op_with(small_graph(), 0, inputs=(flat(3, 0, 1),))),
    ("a read names the version that stands", op_with(small_graph(), 2, inputs=(flat(2, 0),))),
    ("a read names the version that stands", op_with(small_graph(), 0, inputs=(flat(0, 1),))),
    ("a storage lives from its first write to its last use", op_with(small_graph(), 4, inputs=(flat(2, 1),))),
    ("what the forward uses does not hang on saves", storage_with(small_graph(), 2, unheld_dies=2)),
    ("views lie within their storage", op_with(small_graph(), 0, inputs=(flat(0, 0, 26),))),
    ("views lie within their storage", op_with(small_graph(), 0, inputs=(Ref(0, 0, View((5, 5), (1,), 0, "float32")),))),
    ("views lie within their storage", save_with(small_graph(), 0, ref=Ref(1, 0, View((1,), (1,), 25, "float32")))),
    ("writes are in order and both sides agree", storage_with(small_graph(), 2, writes=())),
    ("writes are in order and both sides agree", storage_with(small_graph(), 0, writes=(3,))),
    ("born < unheld_dies <= dies <= end", storage_with(small_graph(), 4, unheld_dies=6, dies=6)),
    ("born < unheld_dies <= dies <= end", storage_with(small_graph(), 4, unheld_dies=3)),
    ("born < unheld_dies <= dies <= end", storage_with(small_graph(), 2, unheld_dies=5)),
    ("a storage is born with its producer", storage_with(small_graph(), 3, born=1)),
    ("a producer returns what it makes", op_with(small_graph(), 3, outputs=())),
    ("writes come after the producer", storage_with(small_graph(), 2, producer=1, born=1)),
    ("an activation has a producer", storage_with(small_graph(), 3, producer=None)),
    ("an activation has a site", storage_with(small_graph(), 3, site="")),
    ("only an activation of the forward is replayable", storage_with(small_graph(), 0, replayable="")),
    ("only an activation of the forward is replayable", storage_with(small_graph(), 4, kind="activation", site="x", replayable="")),
    ("packed <= unpacked <= released, within the step", save_with(small_graph(), 0, released_at=6)),
    ("packed <= unpacked <= released, within the step", save_with(small_graph(), 0, released_at=3)),
    ("packed <= unpacked <= released, within the step", save_with(small_graph(), 1, packed_at=4)),
    ("nothing is saved before it is written", save_with(small_graph(), 1, packed_at=0, ref=flat(2, 0))),
    ("a save holds its storage", save_with(small_graph(), 1, released_at=5)),
    ("a save names the version that stands", save_with(small_graph(), 1, ref=flat(2, 0))),
    ("unpack_order lists each unpacking once", replace(small_graph(), unpack_order=(1, 0, 0))),
    ("unpack_order lists each unpacking once", replace(small_graph(), unpack_order=(1,))),
    ("unpacking is in order, in a backward pass", replace(small_graph(), unpack_order=(0, 1))),
    ("unpacking is in order, in a backward pass", replace(small_graph(), backwards=())),
    ("unpacking is in order, in a backward pass", replace(small_graph(), backwards=(4,))),
]


@pytest.mark.parametrize(("rule", "graph"), BROKEN, ids=[f"{place}: {rule}" for place, (rule, _) in enumerate(BROKEN)])
def test_each_rule_is_found_broken(rule: str, graph: StepGraph) -> None:
    assert rule in {violation.rule for violation in violations(graph)}
    with pytest.raises(RuleViolation, match=rule):
        check(graph)


def test_a_violation_says_where() -> None:
    with pytest.raises(RuleViolation) as caught:
        check(op_with(small_graph(), 2, inputs=(flat(2, 0),)))
    assert str(caught.value) == (
        "graph 'small' breaks 1 rule:\n  a read names the version that stands at op 2 /sum: reads %2@0, but @1 stands"
    )
    assert len(caught.value.violations) == 1


def test_many_violations_are_cut_short() -> None:
    broken = replace(small_graph(), storages=tuple(replace(item, bytes=-1) for item in small_graph().storages) * 5)
    with pytest.raises(RuleViolation, match=r"and [0-9]+ more$"):
        check(broken)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("int64", 8), ("bool", 1), ("complex64", 8), ("float8_e4m3fn", 1), ("quint4x2", 1)],
)
def test_item_sizes_are_read_off_names(dtype: str, size: int) -> None:
    assert itemsize(dtype) == size


def test_item_sizes_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    ):
        assert itemsize(name) == getattr(torch, name).itemsize


def test_extents() -> None:
    assert extent_bytes(View((2, 3), (3, 1), 0, "float32")) == 24
    assert extent_bytes(View((2, 3), (1, 2), 4, "float32")) == 40
    assert extent_bytes(View((1000,), (0,), 0, "float32")) == 4
    assert extent_bytes(View((2, 0), (1, 1), 50, "float32")) == 0
    assert extent_bytes(View((), (), 3, "int64")) == 32


def test_the_peak_by_hand() -> None:
    graph = small_graph()
    # Residents 200; then 100 of the activation, 4 of the sum (with 50 of scratch), 100 of each gradient.
    assert alive_bytes(graph).tolist() == [300, 300, 354, 404, 404]
    assert peak_bytes(graph) == 404
    assert peak_op(graph) == 3


def test_the_peak_of_no_operations_is_what_stands() -> None:
    graph = StepGraph(ops=(), storages=(Storage(id=0, bytes=7, kind="parameter", site="w"),))
    assert (peak_bytes(graph), peak_op(graph)) == (7, None)


@given(graphs.step_graphs())
def test_the_peak_is_the_most_alive_at_one_operation(graph: StepGraph) -> None:
    alive = [sum(item.bytes for item in graph.storages if item.born <= op.id < item.dies) + op.scratch_bytes for op in graph.ops]
    assert np.array_equal(alive_bytes(graph), alive)
    assert peak_bytes(graph) == max(alive)


def test_the_printed_form() -> None:
    graph = small_graph()
    assert print_graph(graph) == (
        f"small torch-eager on cpu {graph.fingerprint}\n"
        "5 operations, 6 storages, 2 saves, peak 404B, step 10.0ms\n"
        "\n"
        "residents 200B\n"
        "  w:w parameter 100B\n"
        "  i:%1 input 100B\n"
        "\n"
        "forward\n"
        "  %2 f32[25] = a/mul(w:w, i:%1) 2.00ms 100B saved recompute-ok\n"
        "  %2@1 f32[25] = a/relu_(%2@0) 0.00us writes %2\n"
        "  %3 f32[1] = /sum(%2@1, dtype=None) 0.00us 4B scratch 50B keep: a decision\n"
        "\n"
        "backward\n"
        "  %4 f32[25] = a/backward(%2@1) 0.00us 100B\n"
        "  %5 f32[25] = a/mul#1(%4@0, i:%1) 0.00us 100B [sync]\n"
    )


def test_a_limit_cuts_each_section() -> None:
    lines = print_graph(small_graph(), limit=1).splitlines()
    assert [line for line in lines if "more" in line] == ["  ... 1 more", "  ... 2 more", "  ... 1 more"]
    assert len(print_graph(graphs.transformer(2), limit=5).splitlines()) < 40


def test_phases_that_alternate_are_printed_in_order() -> None:
    graph = small_graph()
    early = op_with(graph, 1, phase="backward")
    headings = [line for line in print_graph(early).splitlines() if line in ("forward", "backward", "optimizer")]
    assert headings == ["forward", "backward", "forward", "backward"]
