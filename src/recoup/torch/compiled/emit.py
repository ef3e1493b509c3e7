"""Forward and backward modules that run a choice exactly as the simulator judged it.

The forward hands over what is kept and a replay or the backward reads. The backward is written anew, one operation after
the other in the order of the simulated step: before each recorded operation stand the replays that the simulator runs
there, each a copy of its own. So memory stands when the simulator says it stands; nothing is left to a scheduler but what
the compiler below does inside its kernels. What is offloaded is put on its way where the forward makes it, and fetched where
the simulator fetches it (``recoup.torch.compiled.transfers``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from recoup.simulate.backward import Copy, Replayed, run_backward
from recoup.simulate.index import replays
from recoup.simulate.offload import with_fetches
from recoup.torch.compiled.interfaces import (
    example_of,
    extract,
    finish,
    is_random,
    is_symbolic,
    rng_state_example,
    run_and_save_rng_state,
    run_with_rng_state,
    saved_output,
)
from recoup.torch.compiled.joint import Joint
from recoup.torch.compiled.traced import tensors_of
from recoup.torch.compiled.transfers import empty_token, fetch, prefetch, put

__all__ = ["emit"]

Halves = tuple[fx.GraphModule, fx.GraphModule]


def emit(joint: Joint, recompute: frozenset[int], held_from: Mapping[int, int], offload: frozenset[int] = frozenset()) -> Halves:
    """The two halves of the joint graph under a choice of storages to recompute and to offload."""
    replayed = run_backward(with_fetches(replays(joint.graph), offload), recompute | offload, held_from)
    fetched = frozenset(op + len(joint.graph.storages) for op in replayed.ops if op < 0)
    # What a replay makes in passing before it is asked for is not fetched.
    handed_over = _handed_over(joint, recompute | (offload - fetched))
    forward, backward, symbols = extract(joint.module, handed_over, _symbols(joint), joint.num_fwd_outputs)
    sent = _send(joint, forward, fetched)
    states = _draw_again(joint, replayed, forward, backward, symbols)
    _Writer(joint, backward, states, sent).write(replayed)
    return finish(forward, backward=False), finish(backward, backward=True)


def _handed_over(joint: Joint, dropped: frozenset[int]) -> Iterator[fx.Node]:
    """All inputs, and every storage of the forward that is not dropped; extraction leaves out what the backward does not read."""
    outside = joint.graph.backwards[0]
    for storage in joint.graph.storages:
        node = joint.owners[storage.id]
        made = storage.producer is None or storage.producer < outside
        # One of several results that no node takes is not read by anybody.
        if node is not None and made and storage.id not in dropped and isinstance(node.meta["val"], torch.Tensor):
            yield node


def _symbols(joint: Joint) -> list[fx.Node]:
    """Sizes known at run time only, as the forward's inputs give them."""
    return [node for node in joint.module.graph.nodes if node.op == "placeholder" and is_symbolic(node)]


def _send(joint: Joint, forward: fx.GraphModule, offload: frozenset[int]) -> dict[str, int]:
    """Puts offloaded storages on their way as soon as they are made, and hands their tokens over; storages by their nodes' names."""
    owners = {node.name: v for v in offload if (node := joint.owners[v]) is not None}
    output = forward.graph.output_node()
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    saved = list(results[joint.num_fwd_outputs :])
    sent: dict[str, int] = {}
    for place, node in enumerate(saved):
        if isinstance(node, fx.Node) and node.name in owners:
            v = sent[node.name] = owners[node.name]
            with forward.graph.inserting_after(node):
                saved[place] = token = forward.graph.call_function(put, (node, joint.graph.storages[v].site))
            token.meta["val"] = example_of(empty_token())
    output.args = ((*results[: joint.num_fwd_outputs], *saved),)
    return sent


def _draw_again(
    joint: Joint, replayed: Replayed, forward: fx.GraphModule, backward: fx.GraphModule, symbols: int
) -> dict[fx.Node, fx.Node]:
    """Random operations that are replayed hand their generator's state over; for each the backward's input that brings it."""
    drawn = [node for op in dict.fromkeys(replayed.ops) if op >= 0 for node in joint.nodes[op] if is_random(node)]
    if not drawn:
        return {}
    states = [_saving_state(forward, node) for node in drawn]
    _add_outputs(forward, states, joint.num_fwd_outputs)
    first = [node for node in backward.graph.nodes if node.op == "placeholder"][symbols]
    brought: dict[fx.Node, fx.Node] = {}
    with backward.graph.inserting_before(first):
        for number, (node, state) in enumerate(zip(drawn, states, strict=True)):
            brought[node] = backward.graph.placeholder(f"rng_state_{number}")
            brought[node].meta["val"] = state.meta["val"]
    return brought


def _saving_state(forward: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Replaces a random node of the forward by one that also returns the state that it drew from; that state."""
    here = next(other for other in forward.graph.nodes if other.name == node.name)
    with forward.graph.inserting_before(here):
        arguments: Any = (here.target, *here.args)
        both = forward.graph.call_function(run_and_save_rng_state, arguments, dict(here.kwargs))
        state = forward.graph.call_function(operator.getitem, (both, 0))
        result = forward.graph.call_function(operator.getitem, (both, 1))
    state.meta["val"] = rng_state_example(tensors_of(node)[0].device)
    result.meta = dict(here.meta)
    here.replace_all_uses_with(result)
    forward.graph.erase_node(here)
    return state


def _add_outputs(forward: fx.GraphModule, states: list[fx.Node], place: int) -> None:
    """Hands the states over before all else that is saved: what follows the results is told apart from its end."""
    output = forward.graph.output_node()
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    output.args = ((*results[:place], *states, *results[place:]),)
    described = output.meta.get("desc")
    if described is not None:
        saved = len(described) - place + len(states)
        output.meta["desc"] = [*described[:place], *(saved_output(number) for number in range(saved))]
    if "output_stack_traces" in output.meta:
        traces = output.meta["output_stack_traces"]
        output.meta["output_stack_traces"] = [*traces[:place], *(None for _ in states), *traces[place:]]


class _Writer:
    """Writes the backward anew in the simulated order."""

    def __init__(self, joint: Joint, module: fx.GraphModule, states: Mapping[fx.Node, fx.Node], sent: Mapping[str, int]) -> None:
        self.joint = joint
        self.module = module
        self.graph = fx.Graph()
        by_name = {node.name: node for node in joint.module.graph.nodes}
        # The joint graph's node that each node of the extracted backward comes from, and back.
        self.source = {node: by_name[node.name] for node in module.graph.nodes if node.name in by_name}
        self.here = {source: node for node, source in self.source.items()}
        # What stands for each node of the extracted backward now; a replay puts a new copy in an old one's place.
        self.current: dict[fx.Node, fx.Node] = {}
        # Views, sizes and constants, by what they were made from.
        self.free: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.states = states
        # Tokens of offloaded storages, by storage; what the next fetch must come after.
        self.sent = sent
        self.tokens: dict[int, fx.Node] = {}
        self.after: fx.Node | None = None
        self.getitems: dict[fx.Node, list[fx.Node]] = {}
        for node in module.graph.nodes:
            if node.target is operator.getitem:
                self.getitems.setdefault(node.args[0], []).append(node)

    def write(self, replayed: Replayed) -> None:
        """Puts the new graph in the module."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and node.name in self.sent:
                self.tokens[self.sent[node.name]] = self._token(node)
            elif node.op == "placeholder":
                self.current[node] = self.graph.node_copy(node)
        self._body(replayed)
        output = self.module.graph.output_node()
        self.graph.node_copy(output, self._now)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.module.graph = self.graph
        self.module.recompile()

    def _body(self, replayed: Replayed) -> None:
        done = 0
        first: dict[int, list[Copy]] = {}
        for copy in replayed.copies:
            first.setdefault(copy.first, []).append(copy)
        outside = self.joint.graph.backwards[0]
        begins = min((gap for save in self.joint.graph.saves for gap in save.unpacked_at), default=-1)
        for op in range(outside + 1, len(self.joint.graph.ops)):
            while done < len(replayed.ops) and replayed.gaps[done] <= op:
                number = replayed.ops[done]
                if number < 0:
                    self._fetch(number + len(self.joint.graph.storages))
                else:
                    self._replay(number, done, first.get(done, []))
                done += 1
            if op == begins and self.tokens:
                self._begin()
            self._record(op)
        assert done == len(replayed.ops), "a replay after the last operation has no reader"

    def _token(self, node: fx.Node) -> fx.Node:
        """An input that brings a token in place of what is offloaded."""
        token = self.graph.placeholder(f"{node.name}_token")
        token.meta["val"] = example_of(empty_token())
        return token

    def _begin(self) -> None:
        """The backward asks for the first activation: what comes later is fetched ahead from here on."""
        self.after = self.graph.call_function(prefetch, (next(iter(self.tokens.values())),))
        self.after.meta["val"] = example_of(empty_token())

    def _fetch(self, v: int) -> None:
        """An offloaded storage comes back."""
        owner = self.joint.owners[v]
        assert owner is not None
        example = owner.meta["val"]
        size, stride = [[int(one) for one in many] for many in (example.shape, example.stride())]
        made = self.graph.call_function(fetch, (self.tokens[v], self.after, size, stride, example.dtype, example.device))
        made.meta = {key: value for key, value in owner.meta.items() if key in ("val", "tensor_meta", "nn_module_stack", "stack_trace")}
        self.current[self.here[owner]] = made
        self.after = None

    def _record(self, op: int) -> None:
        """An operation of the backward itself."""
        for node in self._nodes(op):
            self._copied(node, {node, *self.getitems.get(node, ())})

    def _replay(self, op: int, number: int, copies: list[Copy]) -> None:
        """An operation of the forward once more. A copy that nobody reads does not take the place of one that stands."""
        owners = {copy.storage: self.joint.owners[copy.storage] for copy in copies}
        idle = {owners[copy.storage] for copy in copies if copy.last == number + 1 and copy.until == copy.gap}
        fresh = {self.here[owner] for owner in owners.values() if owner is not None and owner in self.here and owner not in idle}
        fresh |= {self.here[owner] for owner in idle if owner is not None and owner in self.here and self.here[owner] not in self.current}
        for node in self._nodes(op):
            self._copied(node, fresh)

    def _nodes(self, op: int) -> list[fx.Node]:
        """An operation's nodes in the extracted backward, but for those that extraction found nobody to need."""
        return [self.here[source] for source in self.joint.nodes[op] if source in self.here]

    def _copied(self, node: fx.Node, fresh: set[fx.Node]) -> None:
        """A copy of a node and of its outputs; those in ``fresh`` are read from now on."""
        source = self.source[node]
        if source in self.states:
            made = self._drawn(node, self.current[self.states[source]])
        else:
            made = self.graph.node_copy(node, self._now)
        items = self.getitems.get(node, ())
        if node in fresh or items:
            self.current[node] = made
        for item in items:
            copy = self.graph.node_copy(item, lambda _: made)
            if item in fresh:
                self.current[item] = copy

    def _drawn(self, node: fx.Node, state: fx.Node) -> fx.Node:
        arguments: Any = (state, node.target, *fx.map_arg(node.args, self._now))
        made = self.graph.call_function(run_with_rng_state, arguments, fx.map_arg(dict(node.kwargs), self._now))
        made.meta = dict(node.meta)
        return made

    def _now(self, node: fx.Node) -> fx.Node:
        """What stands for a node now; views and sizes are made from what stands for their arguments."""
        if node in self.current:
            return self.current[node]
        if self._is_op(node):
            raise AssertionError(f"{node.name} is read before it is made")
        arguments = tuple(self._now(argument) for argument in node.all_input_nodes)
        key = (node, arguments)
        if key not in self.free:
            self.free[key] = self.graph.node_copy(node, self._now)
        return self.free[key]

    def _is_op(self, node: fx.Node) -> bool:
        source = self.source.get(node)
        return source in self.joint.place or (
            source is not None and source.target is operator.getitem and source.args[0] in self.joint.place
        )
