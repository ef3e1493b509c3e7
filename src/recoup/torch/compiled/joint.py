"""The joint graph of a compiled module, forward and backward in one, as a step graph.

Storages are read off the traced tensors: two nodes whose tensors share a storage are one storage, whatever the schema of
their operation says. An operation is a node that makes a storage or has an effect; views and sizes are *free*: they are
made again wherever they are needed. The forward is what the forward's outputs need; all else runs in the backward, in the
order in which autograd traced it. Where the compiler below fuses, operations of the backward that it runs as one loop are
one operation here (``recoup.torch.compiled.loops``).

Between the two stands one more operation, ``recoup.outside``: whatever turns the outputs into their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from recoup.graph import Op, Ref, Save, StepGraph, Storage
from recoup.graph.site import op_name, site_of
from recoup.torch.compiled.interfaces import clean_joint, concrete, is_random, may_be_written, module_path, required_forward, tangent_of
from recoup.torch.compiled.loops import loops
from recoup.torch.compiled.traced import is_free, is_item, storage_key, tensors_of, view_of

__all__ = ["OUTSIDE", "Joint", "joint_of"]

OUTSIDE = "recoup.outside"
_EFFECTS = ("_c10d_functional", "with_effects")


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph and what it is as a step.

    Attributes:
        module: the joint graph, cleaned.
        graph: the step.
        nodes: for each operation of the step its nodes in order; none for what happens outside.
        owners: for each storage of the step the node that makes it; None for what no node makes.
        place: the operation of each node that is one.
        inputs: for each input of the forward its storage; None for what is no tensor.
        static_inputs: places of the inputs that stand from step to step.
        results: for each output of the forward its storage; None for what is no tensor.
        tangents: for each gradient that the backward is given its storage, and the result that it belongs to; None if not known.
        gradients: for each input the storage of its gradient; None for what has none.
        fuses: whether loops of the backward are one operation.
    """

    module: fx.GraphModule
    graph: StepGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    owners: tuple[fx.Node | None, ...]
    place: dict[fx.Node, int]
    inputs: tuple[int | None, ...]
    static_inputs: frozenset[int]
    results: tuple[int | None, ...]
    tangents: tuple[tuple[int, int | None], ...]
    gradients: tuple[int | None, ...]
    fuses: bool

    @property
    def num_fwd_outputs(self) -> int:
        """How many of the joint graph's outputs are the forward's."""
        return len(self.results)


def joint_of(module: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int], *, fuses: bool) -> Joint:
    """Reads a joint graph; cleans it in place first, as the stock partitioner does.

    Args:
        module: the joint graph.
        num_fwd_outputs: how many of its outputs are the forward's.
        static_inputs: places of the inputs that stand from step to step.
        fuses: whether the compiler below runs chains of pointwise operations as one loop.
    """
    clean_joint(module)
    return _Reader(module, num_fwd_outputs, static_inputs).joint(fuses)


class _Reader:
    """Walks the nodes once in order, then sets lives and saves."""

    def __init__(self, module: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]) -> None:
        self.module = module
        self.num_fwd_outputs = num_fwd_outputs
        self.static = frozenset(static_inputs)
        self.forward, self.gradients = required_forward(module, num_fwd_outputs, static_inputs)
        self.written = _written_inputs(module)
        self.ops: list[dict[str, Any]] = []
        self.nodes: list[tuple[fx.Node, ...]] = []
        self.storages: list[dict[str, Any]] = []
        self.owners: list[fx.Node | None] = []
        self.by_storage: dict[int, int] = {}
        self.sites: dict[tuple[str, str], int] = {}
        # For each storage the operations that read it, in order.
        self.reads: list[list[int]] = []
        self.readers = _readers(module)

    def joint(self, fuses: bool) -> Joint:
        self._inputs()
        ordered = [node for node in self.module.graph.nodes if node.op == "call_function"]
        for node in ordered:
            if self._in_forward(node):
                self._node((node,), "forward")
        outside = self._outside()
        backward = [node for node in ordered if not self._in_forward(node)]
        for nodes in loops(backward) if fuses else [(node,) for node in backward]:
            self._node(nodes, "backward")
        return self._finished(outside, fuses)

    def _in_forward(self, node: fx.Node) -> bool:
        # What reads an input that the forward overwrites must run before that, even if only the backward asks for it.
        return node in self.forward or (node not in self.gradients and any(arg in self.written for arg in node.all_input_nodes))

    def _inputs(self) -> None:
        for place, node in enumerate(self._primals()):
            for tensor in tensors_of(node):
                self._storage(tensor, node, "parameter" if place in self.static else "input", None)

    def _primals(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder" and "tangents" not in str(node.target)]

    def _outside(self) -> int:
        number = len(self.ops)
        outputs = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and "tangents" in str(node.target):
                for tensor in tensors_of(node):
                    outputs.append(self._ref(tensor, self._storage(tensor, node, "gradient", number)))
        results = [leaf for leaf in tree_leaves(self.module.graph.output_node().args)[: self.num_fwd_outputs] if isinstance(leaf, fx.Node)]
        inputs = self._read(number, [tensor for node in results for tensor in tensors_of(node)])
        self.ops.append({"site": site_of("~outside", 0, OUTSIDE, 0), "target": OUTSIDE, "inputs": inputs, "outputs": tuple(outputs)})
        self.ops[-1].update(module="~outside", phase="backward", provenance="assumed")
        self.nodes.append(())
        return number

    def _node(self, nodes: tuple[fx.Node, ...], phase: str) -> None:
        """One operation, of one node or of those of a loop; nothing for views, sizes and items."""
        inside = set(nodes)
        items = [node for node in nodes if is_item(node)]
        made = [
            (node, output, tensor)
            for node in nodes
            if node not in items
            for output, tensor in enumerate(tensors_of(node))
            if storage_key(tensor) not in self.by_storage and not is_free(node)
        ]
        makers = tuple(node for node in nodes if _has_effect(node) or any(node is one[0] for one in made))
        if makers:
            lasting = [one for one in made if len(makers) == 1 or not self.readers.get(storage_key(one[2]), set()) <= inside]
            self._op(nodes, makers, lasting, phase)
        for item in items:
            self._getitem(item)

    def _op(
        self, nodes: tuple[fx.Node, ...], makers: tuple[fx.Node, ...], made: list[tuple[fx.Node, int, torch.Tensor]], phase: str
    ) -> None:
        number = len(self.ops)
        inputs = self._read(number, [tensor for node in nodes for arg in node.all_input_nodes for tensor in tensors_of(arg)])
        last = makers[-1]
        module = module_path(last) if phase == "forward" else "~backward"
        name = op_name(str(last.target))
        nth = self.sites[(module, name)] = self.sites.get((module, name), -1) + 1
        for place, (node, output, tensor) in enumerate(made):
            self._storage(tensor, node, "activation", number, site_of(module, 0, name, nth, output if len(makers) == 1 else place))
        outputs = tuple(
            self._ref(tensor, self.by_storage[storage_key(tensor)])
            for node in (makers if len(makers) > 1 else (last,))
            for tensor in tensors_of(node)
            if storage_key(tensor) in self.by_storage
        )
        constants = tuple(str(arg) for node in makers for arg in tree_leaves((node.args, node.kwargs)) if not isinstance(arg, fx.Node))
        flags = tuple(dict.fromkeys(flag for node in makers for flag in _flags(node)))
        target = str(last.target) if len(makers) == 1 else f"recoup.loop.{name}"
        self.ops.append({"site": site_of(module, 0, name, nth), "target": target, "inputs": inputs, "outputs": outputs})
        self.ops[-1].update(module=module, phase=phase, constants=constants, flags=flags, provenance="assumed")
        self.nodes.append(makers)

    def _getitem(self, node: fx.Node) -> None:
        """One output of an operation with several: it owns that output's storage from now on."""
        for tensor in tensors_of(node):
            v = self.by_storage.get(storage_key(tensor))
            if v is not None and self.owners[v] is node.args[0]:
                self.owners[v] = node

    def _storage(self, tensor: torch.Tensor, node: fx.Node, kind: str, producer: int | None, site: str = "") -> int:
        key = storage_key(tensor)
        if key in self.by_storage:
            return self.by_storage[key]
        number = self.by_storage[key] = len(self.storages)
        size = concrete(tensor.untyped_storage().nbytes())
        self.storages.append(
            {"bytes": size, "kind": kind, "site": site, "producer": producer, "born": -1 if producer is None else producer}
        )
        self.owners.append(node)
        self.reads.append([])
        return number

    def _read(self, number: int, tensors: list[torch.Tensor]) -> tuple[Ref, ...]:
        refs = []
        for tensor in tensors:
            v = self.by_storage.get(storage_key(tensor))
            if v is None:
                continue  # made within the same loop
            if number not in self.reads[v]:
                self.reads[v].append(number)
            refs.append(self._ref(tensor, v))
        return tuple(dict.fromkeys(refs))

    def _ref(self, tensor: torch.Tensor, storage: int) -> Ref:
        return Ref(storage, 0, view_of(tensor))

    def _finished(self, outside: int, fuses: bool) -> Joint:
        count = len(self.ops)
        stays = self._outputs()
        saves: list[Save] = []
        unpacked: list[tuple[int, int]] = []
        storages = []
        for v, fields in enumerate(self.storages):
            producer = fields["producer"]
            later = [op for op in self.reads[v] if op > outside]
            dies = count if v in stays or producer is None else max([*self.reads[v], producer]) + 1
            activation = producer is not None and producer < outside
            if activation and later:
                ref = Ref(v, 0, view_of(self._example(v)))
                unpacked.extend((op, len(saves)) for op in later)
                saves.append(Save(ref=ref, packed_at=producer + 1, unpacked_at=tuple(later), released_at=dies))
            before = [op for op in self.reads[v] if op <= outside]
            unheld = dies if v in stays or not activation else max([*before, producer]) + 1
            reason = self._kept_because(v, outside, stays)
            stuck = self._immovable_because(v, stays) if activation else ""
            storages.append(Storage(id=v, **fields, dies=dies, unheld_dies=unheld, replayable=reason, movable=stuck))
        graph = StepGraph(
            ops=tuple(Op(id=number, **fields) for number, fields in enumerate(self.ops)),
            storages=tuple(storages),
            saves=tuple(saves),
            unpack_order=tuple(save for _, save in sorted(unpacked)),
            backwards=(outside,),
            frontend="torch-compile",
        )
        place = {node: number for number, nodes in enumerate(self.nodes) for node in nodes}
        return Joint(
            module=self.module,
            graph=graph,
            nodes=tuple(self.nodes),
            owners=tuple(self.owners),
            place=place,
            inputs=tuple(self._storage_of(node) for node in self._primals()),
            static_inputs=self.static,
            results=self._outputs_of(slice(None, self.num_fwd_outputs)),
            tangents=tuple(self._tangents()),
            gradients=self._outputs_of(slice(self.num_fwd_outputs, None)),
            fuses=fuses,
        )

    def _example(self, v: int) -> torch.Tensor:
        node = self.owners[v]
        assert node is not None
        return next(tensor for tensor in tensors_of(node) if self.by_storage[storage_key(tensor)] == v)

    def _outputs(self) -> set[int]:
        """Storages that outlive the graph: the user's results and the gradients."""
        leaves = [leaf for leaf in tree_leaves(self.module.graph.output_node().args) if isinstance(leaf, fx.Node)]
        return {self.by_storage[storage_key(tensor)] for leaf in leaves for tensor in tensors_of(leaf)}

    def _outputs_of(self, part: slice) -> tuple[int | None, ...]:
        return tuple(self._storage_of(leaf) for leaf in tree_leaves(self.module.graph.output_node().args)[part])

    def _tangents(self) -> Iterator[tuple[int, int | None]]:
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and "tangents" in str(node.target):
                v = self._storage_of(node)
                assert v is not None
                yield v, tangent_of(node)

    def _storage_of(self, leaf: object) -> int | None:
        tensors = tensors_of(leaf) if isinstance(leaf, fx.Node) else []
        return self.by_storage[storage_key(tensors[0])] if tensors else None

    def _kept_because(self, v: int, outside: int, stays: set[int]) -> str:
        producer = self.storages[v]["producer"]
        if producer is None or producer >= outside:
            return "not an activation of the forward"
        (node,) = self.nodes[producer]
        if v in stays:
            return "a result of the compiled module"
        if self.storages[v]["bytes"] == 0:
            return "it has no bytes"
        if _has_effect(node):
            return "the operation that makes it has an effect"
        return next(_user_keeps(self._marked(v, node)), "") or self._reads_written(node)

    def _immovable_because(self, v: int, stays: set[int]) -> str:
        """Why an activation cannot be sent away and fetched back."""
        if v in stays:
            return "it is a result of the compiled module, which the caller holds"
        example = self._example(v)
        if not all(isinstance(size, int) for size in (*example.shape, *example.stride(), example.storage_offset())):
            return "its size is known at run time only; compile with dynamic=False"
        if any("effect" in self.ops[op]["flags"] for op in (self.storages[v]["producer"], *self.reads[v]) if "flags" in self.ops[op]):
            return "an operation with an effect makes or reads it"
        key = storage_key(example)
        if any(may_be_written(node) and key in map(storage_key, _first(node)) for node in self.readers.get(key, ())):
            return "the compiler may write it in place, where nobody sees it"
        return ""

    def _marked(self, v: int, node: fx.Node) -> list[fx.Node]:
        owner = self.owners[v]
        return [node] if owner is None or owner is node else [node, owner]

    def _reads_written(self, node: fx.Node) -> str:
        for arg in node.all_input_nodes:
            if any(self.owners[self.by_storage[storage_key(tensor)]] in self.written for tensor in tensors_of(arg)):
                return "it reads an input that the step writes in place"
        return ""


def _readers(module: fx.GraphModule) -> dict[int, set[fx.Node]]:
    """For each traced storage the nodes that read it, through whatever view; those that only view it are among them."""
    readers: dict[int, set[fx.Node]] = {}
    for node in module.graph.nodes:
        for argument in node.all_input_nodes:
            for tensor in tensors_of(argument):
                readers.setdefault(storage_key(tensor), set()).add(node)
    return readers


def _first(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of a node's first argument, which an operation in place would write."""
    return [tensor for leaf in tree_leaves(node.args[:1]) if isinstance(leaf, fx.Node) for tensor in tensors_of(leaf)]


def _written_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Placeholders that the graph overwrites at its end (statistics of batch norm, counters)."""
    return {node.args[0] for node in module.graph.nodes if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"}


def _has_effect(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        # A higher-order operation: what it does inside is its own business.
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.target._schema.is_mutable or any(part in str(node.target) for part in _EFFECTS)


def _flags(node: fx.Node) -> Iterator[str]:
    if is_random(node):
        yield "random"
    if "_c10d_functional" in str(node.target):
        yield "collective"
    if _has_effect(node):
        yield "effect"


def _user_keeps(nodes: list[fx.Node]) -> Iterator[str]:
    if any(node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE for node in nodes):
        yield "a checkpoint policy or PyTorch itself says that it must be saved"
    if any("inductor_seed" in str(node.target) for node in nodes):
        yield "a seed of random numbers"
