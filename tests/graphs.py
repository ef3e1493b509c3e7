"""Step graphs for tests: hand-made ones, a synthetic transformer, and hypothesis strategies.

A graph is built with :class:`Builder`: forward operations first, then ``backward()`` mirrors them, unpacking in reverse
what autograd would have saved. Lives are exact: a storage dies after its last reader, a saved one after its release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from recoup.graph import Op, Ref, Save, StepGraph, Storage, View

__all__ = [
    "Builder", "Recipe", "chain", "deep_chain", "inplace_chain", "multi_output", "random_graph", "shared_input", "step_graphs",
    "transformer", "unsaved_leaf",
]  # fmt: skip


def view(count: int) -> View:
    """A flat view on a whole storage of one-byte elements."""
    return View((count,), (1,), 0, "uint8")


@dataclass
class _Draft:
    """A storage being built."""

    bytes: int
    kind: str
    site: str = ""
    producer: int | None = None
    born: int = -1
    writes: list[int] = field(default_factory=list)
    last_use: int = -1
    outlives: bool = False
    replayable: str = "not an activation of the forward"


@dataclass
class _Forward:
    """A forward operation and what its backward needs."""

    op: int
    saved: tuple[int, ...]
    seconds: float
    module: str
    grad_bytes: int
    needs_grad_of: tuple[int, ...]


class Builder:
    """Builds one step graph, forward then mirrored backward."""

    def __init__(self, name: str = "step") -> None:
        self.name = name
        self.drafts: list[_Draft] = []
        self.ops: list[Op] = []
        self.saves: list[Save] = []
        self.forwards: list[_Forward] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.unpack_order: list[int] = []
        self.backwards: list[int] = []
        self._pending: list[tuple[int, int, int]] = []

    def standing(self, count: int, kind: str = "parameter", site: str = "") -> int:
        """A storage that stood before the step and outlives it."""
        self.drafts.append(_Draft(count, kind, site or f"{kind}{len(self.drafts)}", outlives=True))
        return len(self.drafts) - 1

    def _site(self, module: str, name: str) -> str:
        nth = self.counts.get((module, name), 0)
        self.counts[(module, name)] = nth + 1
        return f"{module}/{name}" + (f"#{nth}" if nth else "")

    def op(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...] = (),
        *,
        saves: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        seconds: float = 1.0,
        scratch: int = 0,
        module: str = "",
        flags: tuple[str, ...] = (),
        replayable: str = "",
        outlives: bool = False,
        backward: bool = True,
    ) -> tuple[int, ...]:
        """A forward operation that makes storages of the given sizes; ``saves`` are storages, -1, -2.. its own outputs."""
        number = len(self.ops)
        site = self._site(module, name)
        refs = tuple(self._ref(v) for v in inputs)
        made: list[int] = []
        for place, count in enumerate(outputs):
            self.drafts.append(
                _Draft(
                    count, "activation", site + (f":{place}" if place else ""), number, number, last_use=number, outlives=outlives,
                    replayable=replayable,
                )
            )  # fmt: skip
            made.append(len(self.drafts) - 1)
        for v in (*inputs, *mutates):
            self.drafts[v].last_use = number
        for v in mutates:
            self.drafts[v].writes.append(number)
        self.ops.append(
            Op(
                id=number, site=site, target=f"aten.{name}.default", inputs=refs, outputs=tuple(self._ref(v) for v in (*made, *mutates)),
                mutates=mutates, seconds=seconds, scratch_bytes=scratch, flags=flags, module=module,
            )
        )  # fmt: skip
        saved = tuple(made[-1 - v] if v < 0 else v for v in saves)
        if backward:
            self.forwards.append(_Forward(number, saved, seconds, module, sum(outputs), inputs))
        return tuple(made)

    def _ref(self, v: int) -> Ref:
        return Ref(v, len(self.drafts[v].writes), view(self.drafts[v].bytes))

    def backward(self, factor: float = 2.0, gradients: bool = True) -> StepGraph:
        """Mirror the forward: one backward operation for each forward one, in reverse; returns the finished graph."""
        unheld = [draft.last_use + 1 for draft in self.drafts]
        self.backwards.append(len(self.ops))
        for forward in reversed(self.forwards):
            self._pending.append((len(self.ops), forward.op, 0))
            number = len(self.ops)
            made: tuple[int, ...] = ()
            if gradients:
                self.drafts.append(_Draft(forward.grad_bytes, "gradient", "", number, number, last_use=number + 1))
                made = (len(self.drafts) - 1,)
            self.ops.append(
                Op(
                    id=number, site=self._site(forward.module, f"backward{forward.op}"), target="aten.backward.default",
                    inputs=tuple(self._ref(v) for v in forward.saved), outputs=tuple(self._ref(v) for v in made),
                    seconds=forward.seconds * factor, module=forward.module, phase="backward",
                )
            )  # fmt: skip
        at = {forward: gap for gap, forward, _ in self._pending}
        numbers: dict[int, list[int]] = {}
        for item in self.forwards:
            for v in item.saved:
                gap = at[item.op]
                numbers.setdefault(item.op, []).append(len(self.saves))
                self.saves.append(Save(ref=self._ref(v), packed_at=item.op + 1, unpacked_at=(gap,), released_at=gap + 1))
        for item in reversed(self.forwards):
            self.unpack_order.extend(numbers.get(item.op, []))
        return self._finish(unheld)

    def _finish(self, unheld: list[int]) -> StepGraph:
        count = len(self.ops)
        released: dict[int, int] = {}
        for save in self.saves:
            released[save.ref.storage] = max(released.get(save.ref.storage, 0), save.released_at)
        storages = []
        for number, draft in enumerate(self.drafts):
            free = count if draft.outlives else min(unheld[number] if number < len(unheld) else draft.last_use + 1, count)
            storages.append(
                Storage(
                    id=number, bytes=draft.bytes, kind=draft.kind, site=draft.site, producer=draft.producer,  # type: ignore[arg-type]
                    writes=tuple(draft.writes), born=draft.born, dies=max(free, released.get(number, 0)), unheld_dies=free,
                    replayable=draft.replayable,
                )
            )  # fmt: skip
        return StepGraph(
            ops=tuple(self.ops), storages=tuple(storages), saves=tuple(self.saves), unpack_order=tuple(self.unpack_order),
            backwards=tuple(self.backwards), name=self.name,
        )  # fmt: skip


def with_blocks(graph: StepGraph, blocks: tuple[str, ...]) -> StepGraph:
    """The graph with its repeated blocks named."""
    return msgspec.structs.replace(graph, blocks=blocks)


def chain(sizes: tuple[int, ...] = (100, 200, 300), weight: int = 10) -> StepGraph:
    """x -> a -> b -> ..., each operation saving its own output; the last result is the loss and saved too."""
    build = Builder("chain")
    w = build.standing(weight)
    x = build.standing(50, "input")
    for place, size in enumerate(sizes):
        (x,) = build.op("relu", (x, w), (size,), saves=(-1,), module=f"layers.{place}")
    return build.backward()


def deep_chain(length: int) -> StepGraph:
    """x -> a1 -> a2 ...: equal operations, each saving its result, no gradients: only activations move."""
    build = Builder("deep")
    x = build.standing(1, "input")
    for place in range(length):
        (x,) = build.op("relu", (x,), (100,), saves=(-1,), module=f"layers.{place}")
    return build.backward(gradients=False)


def shared_input() -> StepGraph:
    """One activation read and saved by three operations (as query, key and value do)."""
    build = Builder("shared")
    x = build.standing(10, "input")
    (h,) = build.op("norm", (x,), (1000,), module="norm")
    outs = [build.op("linear", (h,), (100,), saves=(h,), module=name)[0] for name in "qkv"]
    build.op("sum", tuple(outs), (4,), module="")
    return build.backward()


def multi_output() -> StepGraph:
    """An operation with two outputs, of which one is saved and the other only read."""
    build = Builder("multi")
    x = build.standing(10, "input")
    a, b = build.op("split", (x,), (100, 300), scratch=7, module="m")
    (c,) = build.op("mul", (a,), (50,), saves=(a,), module="m")
    build.op("add", (c, b), (4,), module="m")
    return build.backward()


def inplace_chain() -> StepGraph:
    """A result written in place twice before it is saved."""
    build = Builder("inplace")
    x = build.standing(10, "input")
    (a,) = build.op("linear", (x,), (500,), module="m")
    build.op("add_", (a, x), mutates=(a,), seconds=0.5, module="m", backward=False)
    build.op("relu_", (a,), mutates=(a,), seconds=0.25, module="m", backward=False)
    (b,) = build.op("linear", (a,), (100,), saves=(a,), module="n")
    build.op("sum", (b,), (4,), module="")
    return build.backward()


def unsaved_leaf() -> StepGraph:
    """A saved activation made from one that nobody saves: dropping it keeps the other for the replay."""
    build = Builder("leaf")
    x = build.standing(10, "input")
    (a,) = build.op("linear", (x,), (100,), module="m")
    (b,) = build.op("gelu", (a,), (1000,), module="m")
    (c,) = build.op("linear", (b,), (100,), saves=(b,), module="n")
    (d,) = build.op("linear", (c,), (900,), module="o", backward=False)
    build.op("sum", (d,), (4,), module="")
    return build.backward()


def transformer(blocks: int = 12, tokens: int = 4096, width: int = 768, heads: int = 12) -> StepGraph:
    """A synthetic pre-norm transformer: about 27 forward operations a block, plausible sizes, saves and times."""
    build = Builder(f"transformer-{blocks}")
    row = tokens * width * 4
    square = heads * tokens * 256 * 4
    ids = build.standing(tokens * 8, "input")
    table = build.standing(width * 8000 * 4)
    (x,) = build.op("embedding", (ids, table), (row,), module="wte", seconds=row / 5e9, saves=(ids,))
    for place in range(blocks):
        x = _block(build, f"h.{place}", x, row, square, width)
    (x,) = _norm(build, "ln_f", x, row)
    head = build.standing(width * 8000 * 4)
    (logits,) = build.op("mm", (x, head), (tokens * 2000 * 4,), module="head", seconds=2.0e-2, saves=(x,))
    (soft,) = build.op("log_softmax", (logits,), (tokens * 2000 * 4,), module="", seconds=1e-2, saves=(-1,))
    build.op("nll_loss", (soft,), (4,), module="", seconds=1e-4, outlives=True)
    return with_blocks(build.backward(), tuple(f"h.{place}" for place in range(blocks)))


def _norm(build: Builder, module: str, x: int, row: int) -> tuple[int, ...]:
    small = max(row // 1000, 8)
    w = build.standing(3072)
    y, _mean, _rstd = build.op(
        "native_layer_norm", (x, w), (row, small, small), module=module, seconds=row / 4e9, saves=(x, -2, -3)
    )  # fmt: skip
    return (y,)


def _linear(build: Builder, module: str, x: int, out: int, weight: int, seconds: float) -> int:
    w = build.standing(weight)
    (y,) = build.op("addmm", (x, w), (out,), module=module, seconds=seconds, saves=(x, w), scratch=out // 8)
    return y


def _cheap(build: Builder, module: str, name: str, inputs: tuple[int, ...], out: int, saves: tuple[int, ...] = ()) -> int:
    return build.op(name, inputs, (out,), module=module, seconds=out / 8e9, saves=saves)[0]


def _block(build: Builder, path: str, x: int, row: int, square: int, width: int) -> int:
    weight, gemm = width * width * 4, row / 4 * width * 2 / 1e11
    attn, mlp = f"{path}.attn", f"{path}.mlp"
    (y,) = _norm(build, f"{path}.ln_1", x, row)
    qkv = [_linear(build, f"{attn}.{name}", y, row, weight, gemm) for name in ("q", "k", "v")]
    q, k, v = (_cheap(build, attn, "clone", (item,), row) for item in qkv)
    (scores,) = build.op("bmm", (q, k), (square,), module=attn, seconds=gemm / 2, saves=(q, k))
    scaled = _cheap(build, attn, "div", (scores,), square)
    masked = _cheap(build, attn, "masked_fill", (scaled,), square)
    soft = _cheap(build, attn, "softmax", (masked,), square, saves=(-1,))
    dropped, _mask = build.op(
        "native_dropout", (soft,), (square, square // 4), module=attn, seconds=square / 4e9, saves=(-2,), flags=("random",)
    )  # fmt: skip
    (mixed,) = build.op("bmm", (dropped, v), (row,), module=attn, seconds=gemm / 2, saves=(dropped, v))
    mixed = _cheap(build, attn, "transpose_copy", (mixed,), row)
    out = _linear(build, f"{attn}.proj", mixed, row, weight, gemm)
    x = _cheap(build, path, "add", (x, out), row)
    (y,) = _norm(build, f"{path}.ln_2", x, row)
    wide = _linear(build, f"{mlp}.fc", y, 4 * row, 4 * weight, 4 * gemm)
    cube = _cheap(build, mlp, "pow", (wide,), 4 * row, saves=(wide,))
    half = _cheap(build, mlp, "mul", (cube,), 4 * row)
    inner = _cheap(build, mlp, "add", (wide, half), 4 * row)
    tanh = _cheap(build, mlp, "tanh", (inner,), 4 * row, saves=(-1,))
    one = _cheap(build, mlp, "add", (tanh,), 4 * row)
    gelu = _cheap(build, mlp, "mul", (wide, one), 4 * row, saves=(wide, one))
    out = _linear(build, f"{mlp}.proj", gelu, row, 4 * weight, 4 * gemm)
    return _cheap(build, path, "add", (x, out), row)


@dataclass(frozen=True)
class Recipe:
    """What a random forward operation does; indices are taken modulo what exists."""

    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    save_inputs: bool = True
    save_output: bool = False
    writes: bool = False
    seconds: int = 1
    scratch: int = 0
    random: bool = False
    opaque: bool = False


_recipes = st.builds(
    Recipe,
    reads=st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple),
    outputs=st.lists(st.sampled_from([1, 3, 10, 30, 70, 100]), min_size=1, max_size=2).map(tuple),
    save_inputs=st.sampled_from([True, True, False]),
    save_output=st.booleans(),
    writes=st.sampled_from([False, False, False, True]),
    seconds=st.integers(1, 9),
    scratch=st.sampled_from([0, 0, 0, 5, 40]),
    random=st.sampled_from([False, False, False, True]),
    opaque=st.sampled_from([False, False, False, False, True]),
)


def _recent(build: Builder, activations: list[int], pick: int) -> int:
    return activations[-1 - pick % min(len(activations), 4)]


def random_graph(recipes: list[Recipe], gradients: bool = True) -> StepGraph:
    """The graph that a list of recipes describes; without gradients the activations alone make the peak."""
    build = Builder("random")
    x = build.standing(20, "input")
    w = build.standing(15)
    # What an in-place write changed is read only afterwards, as autograd demands; what is saved is not written again.
    activations, saved = [x], {x, w}
    for place, recipe in enumerate(recipes):
        module = f"layers.{place // 3}"
        reads = tuple(dict.fromkeys(_recent(build, activations, pick) for pick in recipe.reads))
        target = reads[0]
        flags = ("random",) if recipe.random else ()
        writers = build.drafts[target].last_use == build.drafts[target].born
        if recipe.writes and target not in saved and writers and build.drafts[target].kind == "activation":
            build.op("add_", (target, w), mutates=(target,), seconds=recipe.seconds, module=module, flags=flags, backward=False)
            continue
        saves = (*(reads if recipe.save_inputs else ()), *((-1,) if recipe.save_output else ()))
        made = build.op(
            "op", (*reads, w), recipe.outputs, saves=saves, seconds=recipe.seconds, scratch=recipe.scratch, module=module, flags=flags,
            replayable="opaque" if recipe.opaque else "",
        )  # fmt: skip
        saved.update(v for v in saves if v >= 0)
        saved.update(made[:1] if recipe.save_output else ())
        activations.extend(made)
    # A last wide operation whose result the backward does not need: something to make room for.
    build.op("wide", (activations[-1],), (100,), module="head")
    return build.backward(gradients=gradients)


def step_graphs(max_ops: int = 9) -> st.SearchStrategy[StepGraph]:
    """Random graphs: chains with skips, several outputs, in-place writes, uneven sizes, opaque and random operations."""
    return st.builds(random_graph, st.lists(_recipes, min_size=3, max_size=max_ops), st.booleans())
