"""Every private interface of PyTorch's compiler that Recoup leans on, in one place, with a self-test.

Written against torch 2.13. Nothing else in Recoup imports ``torch._functorch``, ``torch._inductor`` or ``torch._dynamo``.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "Compiled",
    "Compiler",
    "CustomPartitionerFn",
    "Recompilable",
    "aten_compiler",
    "clean_joint",
    "concrete",
    "example_of",
    "extract",
    "finish",
    "graph_breaks",
    "inductor_compiler",
    "intercepted",
    "is_random",
    "is_symbolic",
    "keep_all",
    "may_be_written",
    "module_path",
    "no_modes",
    "required_forward",
    "rng_state_example",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "saved_output",
    "self_test",
    "tangent_of",
]

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any], CustomPartitionerFn], Compiled]


def inductor_compiler(options: Mapping[str, Any], **others: Any) -> Compiler:
    """Inductor, with the joint graph split by a partitioner after Inductor's own joint passes.

    ``options`` are Inductor's settings, ``others`` further arguments of its entry point.
    """

    def compile_with(gm: fx.GraphModule, inputs: Sequence[Any], partitioner: CustomPartitionerFn) -> Compiled:
        from torch._inductor.compile_fx import compile_fx

        patches = {**options, **_NOTHING_WAITS, "custom_partitioner_fn": partitioner}
        if getattr(partitioner, "moves", False):
            patches |= _EACH_BUFFER_ITS_OWN
        with _passing_through():
            return compile_fx(gm, inputs, config_patches=patches, **others)  # type: ignore[return-value]

    compile_with.fuses = True  # type: ignore[attr-defined]
    return compile_with


def aten_compiler() -> Compiler:
    """Plain ATen kernels: the two graphs run as they are, and let go of each tensor after its last use."""

    def compile_with(gm: fx.GraphModule, inputs: Sequence[Any], partitioner: CustomPartitionerFn) -> Compiled:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True)
        return backend(gm, inputs)

    return compile_with


# Inductor keeps a dead buffer for a later one of its size, up to its own estimate of the peak. A plan counts it as gone.
_NOTHING_WAITS = {"allow_buffer_reuse": False, "memory_planning": False}
# A transfer still reads a buffer after its last use in the graph: what is on its way must not be written by whatever comes next.
_EACH_BUFFER_ITS_OWN = {**_NOTHING_WAITS, "inplace_buffers": False, "triton.cudagraphs": False}

_DEPTH = threading.local()


@contextmanager
def _passing_through() -> Generator[None]:
    """Compilations that start in here are Inductor's own, whoever intercepts."""
    _DEPTH.value = getattr(_DEPTH, "value", 0) + 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


@contextmanager
def intercepted(handle: Callable[[fx.GraphModule, Sequence[Any], Compiler], Compiled]) -> Generator[None]:
    """While this is open, every graph that ``torch.compile`` hands to Inductor goes to ``handle`` instead, with a way to compile it.

    Graphs compiled before are compiled anew, here and after the end.
    """
    from torch._inductor import compile_fx as home

    original = home.compile_fx

    def instead(gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, config_patches: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if getattr(_DEPTH, "value", 0):
            return original(gm, inputs, *args, config_patches=config_patches, **kwargs)
        assert not args, "torch.compile passes Inductor's options by name"
        return handle(gm, inputs, inductor_compiler(config_patches or {}, **kwargs))

    home.compile_fx = instead  # type: ignore[assignment]
    torch.compiler.reset()
    try:
        yield
    finally:
        home.compile_fx = original
        torch.compiler.reset()


@contextmanager
def graph_breaks() -> Generator[list[str]]:
    """Collects why dynamo broke graphs while this was open: what stands there runs in eager, and no plan reaches it."""
    from torch._dynamo.utils import counters

    before = dict(counters["graph_break"])
    reasons: list[str] = []
    yield reasons
    after = counters["graph_break"].items()
    reasons.extend(" ".join(reason.split("\n")[0].split()) for reason, count in after if count > before.get(reason, 0))


class Recompilable:
    """A graph from dynamo that can be compiled again later, when its example inputs are long gone.

    It keeps the graph, the traced (fake) inputs and the context that the first compilation ran in.

    Attributes:
        fuses: whether the compiler below fuses pointwise operations into loops.
    """

    def __init__(self, gm: fx.GraphModule, compiler: Compiler) -> None:
        self.fuses = getattr(compiler, "fuses", False)
        self._gm = gm
        self._graph = copy.deepcopy(gm.graph)
        self._compiler = compiler
        self._context = TracingContext.try_get()
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = [node.meta.get("example_value") for node in placeholders]
        self._sources = [getattr(node, "_dynamo_source", None) for node in placeholders]

    def compiled(self, partitioner: CustomPartitionerFn, inputs: Sequence[Any] | None, *, looks: bool) -> Compiled:
        """The graph compiled with this partitioner.

        Args:
            partitioner: splits the joint graph.
            inputs: the example inputs while they are at hand, else None.
            looks: whether the partitioner must be asked even if AOTAutograd has the result in its cache.
        """
        gm = fx.GraphModule(self._gm, copy.deepcopy(self._graph))
        gm.meta = dict(self._gm.meta)
        caching = functorch_config.patch(enable_autograd_cache=False) if looks else nullcontext()
        with caching:
            if inputs is not None:
                return self._compiler(gm, inputs, partitioner)
            with tracing(self._context):
                return self._compiler(gm, self._inputs, partitioner)

    def parameters(self) -> list[tuple[int, str]]:
        """Places of the inputs that are parameters or buffers, with their names inside of the compiled module."""
        found = [(place, source.name) for place, source in enumerate(self._sources) if source is not None]
        return [(place, _plain(name)) for place, name in found if "_parameters" in name or "_buffers" in name]


def clean_joint(gm: fx.GraphModule) -> None:
    """Dead code and common subexpressions out of a joint graph, and the marks of what must be saved on, as the stock partitioner does."""
    gm.graph.eliminate_dead_code()
    if functorch_config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    gm.recompile()
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(gm)
    partitioners.force_save_effectful_ops(gm)
    partitioners.force_save_bw_mutation_src(gm)


def required_forward(gm: fx.GraphModule, num_fwd_outputs: int, static: Sequence[int]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that the forward's outputs need, and those that hang on a gradient."""
    info = partitioners.classify_nodes(gm, list(static), num_fwd_outputs)
    return set(info.required_fw_nodes), set(info.tangents_closure)


def keep_all(gm: fx.GraphModule, joint_inputs: Sequence[object], num_fwd_outputs: int, static: Sequence[int]) -> Any:
    """The stock split that recomputes nothing; for graphs in which nothing depends on a gradient."""
    return partitioners.default_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=list(static))


def extract(
    gm: fx.GraphModule, saved: Iterable[fx.Node], symbols: Iterable[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward and backward modules that hand over just these nodes; the backward rebuilds what else it needs. Also how many symbols."""
    symbols = list(symbols)
    forward, backward = partitioners._extract_fwd_bwd_modules(
        gm, list(saved), saved_sym_nodes=symbols, saved_opaque_nodes=[], num_fwd_outputs=num_fwd_outputs
    )
    return forward, backward, len(symbols)


def finish(module: fx.GraphModule, *, backward: bool) -> fx.GraphModule:
    """The passes that every half of a split graph goes through at the end."""
    return partitioners.thread_graphsafe_rng_from_hops(raise_getitems(module), is_backward=backward)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node is a size or another number known at run time only."""
    return partitioners.is_sym_node(node)


def is_random(node: fx.Node) -> bool:
    """Whether running a node again draws other numbers. What Inductor draws from a seed that is handed over does not."""
    tags = getattr(node.target, "tags", ())
    if str(node.target).startswith("prims.inductor_"):
        return "inductor_seed" in str(node.target) and "lookup" not in str(node.target)
    return torch.Tag.nondeterministic_seeded in tags


def concrete(value: Any) -> int:
    """A size as a number: symbolic ones by the example that the graph was traced with."""
    if isinstance(value, int):
        return value
    return int(value.node.require_hint() if hasattr(value.node, "require_hint") else value.node.hint)


def module_path(node: fx.Node) -> str:
    """The path of the innermost module whose forward made a node, below the compiled module; '' for that module itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    return _plain(path)


def _plain(path: str) -> str:
    """``L['self'].layers[0].mlp`` and ``L['fn']._modules['0']`` as ``layers.0.mlp`` and ``0``."""
    for mark in ("[", "]", "'", '"'):
        path = path.replace(mark, "." if mark == "[" else "")
    parts = [part for part in path.split(".") if part and part not in ("_modules", "_parameters", "_buffers", "_orig_mod")]
    return ".".join(parts[2:] if parts[:1] == ["L"] else parts[1:])


@contextmanager
def no_modes() -> Generator[None]:
    """Real operations on real tensors, in the middle of tracing."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


def may_be_written(node: fx.Node) -> bool:
    """Whether Inductor may run an operation in place on its first argument, once nothing else in the graph reads that."""
    name = str(node.target)
    return name.startswith(("aten.index_put", "aten._unsafe_index_put", "aten._foreach")) or "scatter" in name


def rng_state_example(device: torch.device) -> Any:
    """A fake tensor like the state of the device's generator."""
    with unset_fake_temporarily():
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return example_of(state)


def example_of(tensor: torch.Tensor) -> Any:
    """A fake tensor like this one, in the mode that is tracing."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    assert mode is not None
    with mode:
        return mode.from_tensor(tensor)


def tangent_of(node: fx.Node) -> int | None:
    """Which of the forward's results a gradient that the backward is given belongs to; None if it is not one of the user's."""
    return getattr(getattr(node.meta.get("desc"), "output", None), "idx", None)


def saved_output(number: int) -> Any:
    """What describes the forward's ``number``-th output that is saved for the backward."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return SavedForBackwardsAOTOutput(number)


def self_test() -> list[tuple[str, bool, str]]:
    """Try what the compiled executors lean on; a list of (what, works, detail)."""
    return [
        _tried("the joint graph can be split at chosen nodes", _splits),
        _tried("extraction takes the arguments known", _signature),
        _tried("Inductor can be told to use no buffer again", _buffers_of_their_own),
    ]


def _tried(what: str, test: Callable[[], bool]) -> tuple[str, bool, str]:
    try:
        return what, test(), ""
    except (AttributeError, ImportError, RuntimeError, TypeError) as error:
        return what, False, f"{type(error).__name__}: {error}"


def _signature() -> bool:
    known = set(inspect.signature(partitioners._extract_fwd_bwd_modules).parameters)
    return {"joint_module", "saved_values", "saved_sym_nodes", "saved_opaque_nodes", "num_fwd_outputs"} <= known


def _buffers_of_their_own() -> bool:
    from torch._inductor import config

    with config.patch(_EACH_BUFFER_ITS_OWN):
        return not config.allow_buffer_reuse and not config.inplace_buffers


def _splits() -> bool:
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function

    seen: list[int] = []

    def partition(gm: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: object) -> Any:
        clean_joint(gm)
        forward, _ = required_forward(gm, num_fwd_outputs, ())
        inputs_only = [node for node in forward if node.op == "placeholder"]
        one, other, _ = extract(gm, inputs_only, [], num_fwd_outputs)
        seen.append(len([node for node in other.graph.nodes if node.op == "placeholder"]))
        return finish(one, backward=False), finish(other, backward=True)

    x = torch.full((2,), 0.5, requires_grad=True)
    nop: Any = boxed_nop
    aot_function(lambda x: x.tanh().exp(), fw_compiler=nop, bw_compiler=nop, partition_fn=partition)(x).sum().backward()
    want = x.detach().tanh().exp() * (1 - x.detach().tanh() ** 2)
    return seen == [2] and x.grad is not None and bool(torch.allclose(x.grad, want))
