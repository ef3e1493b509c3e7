"""From a joint jaxpr to a step graph: which equations run as one, which values are one piece of memory, who reads what.

- Views (reshapes, transposes, broadcasts, tags) are their operand's storage.
- A chain of elementwise equations in which each result has one reader runs as one operation, as XLA fuses it: its inner
  results never stand in memory. Nothing that the backward reads is lost by it, for that has a second reader.
- Gradients that the step returns have buffers that stand from the start: XLA puts nothing else in them.
- All that belongs to a planned loop is one operation in the forward and one in the backward; what it hands from the one to
  the other is one storage, its *stack*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from recoup.graph import Op, Ref, Save, StepGraph, Storage, View
from recoup.graph.site import site_of
from recoup.jax.costs import ALIASES, ELEMENTWISE, REDUCTIONS, Rates, flops_of, moved_of, scratch_of, seconds_of
from recoup.jax.jaxprs import bytes_of, elements_of, is_dropped, is_literal
from recoup.jax.joint import Joint
from recoup.jax.naming import module_of

__all__ = ["Built", "Given", "build"]

Given = Literal["parameter", "input", "outside", "carry"]
CARRY = "the loop's carry: to make it again the turns before would have to run again"
_EFFECT = "it has a side effect"


@dataclass(frozen=True, eq=False)
class Built:
    """A region's graph, which variables of its joint jaxpr each storage stands for, and of which variable a view is."""

    joint: Joint
    graph: StepGraph
    variables: dict[int, tuple[Any, ...]]
    roots: dict[Any, Any]
    names: dict[str, tuple[str, ...]]

    @cached_property
    def by_site(self) -> dict[str, int]:
        """Storage ids by the site of the activation."""
        return {storage.site: storage.id for storage in self.graph.storages if storage.kind == "activation"}


@dataclass(slots=True)
class _Unit:
    """Equations that run as one operation."""

    section: Literal["forward", "backward"]
    eqns: list[int]
    module: str
    name: str
    loop: str = ""


@dataclass(slots=True)
class _Value:
    """A piece of memory while the graph is built."""

    var: Any
    producer: int | None
    bytes: int
    count: int
    dtype: str
    readers: list[int] = field(default_factory=list)
    stays: bool = False
    id: int = -1


def build(joint: Joint, given: tuple[Given, ...], rates: Rates, loops: frozenset[str] = frozenset(), *, name: str, root: str = "") -> Built:
    """The step graph of a region.

    Args:
        joint: the region.
        given: what each input is: a parameter, an input, something outside of a loop, or a loop's carry.
        rates: of the device.
        loops: module paths of planned loops.
        name: of the graph.
        root: module path of the loop that the region is the body of, '' for the whole step.
    """
    return _Builder(joint, given, rates, loops, name, root).built()


class _Builder:
    def __init__(self, joint: Joint, given: tuple[Given, ...], rates: Rates, loops: frozenset[str], name: str, root: str) -> None:
        self.joint, self.given, self.rates, self.loops, self.name, self.root = joint, given, rates, loops, name, root
        self.eqns = joint.jaxpr.eqns
        self.early = frozenset(joint.early)
        self.roots: dict[Any, Any] = {}
        self.tags: dict[Any, list[str]] = {}
        self.loop_of: dict[int, str] = {}
        self.readers: dict[Any, set[int]] = {}
        self._resolve()
        self.results = {self._root(atom) for atom in (*joint.results, *joint.gradients) if not is_literal(atom)}
        self.units = self._units()
        self.values: dict[Any, _Value] = {}
        # For each operation the values that it reads and makes.
        self.reads: defaultdict[int, list[_Value]] = defaultdict(list)
        self.makes: defaultdict[int, list[_Value]] = defaultdict(list)

    # -- which variables are one piece of memory

    def _resolve(self) -> None:
        """Roots of views, and the equations that read each root."""
        for number in sorted(self.joint.live):
            eqn = self.eqns[number]
            module = module_of(eqn)
            if module in self.loops:
                self.loop_of[number] = module
            elif self._is_view(eqn):
                operand = next((atom for atom in eqn.invars if not is_literal(atom)), None)
                root = None if operand is None else self._root(operand)
                self.roots[eqn.outvars[0]] = root
                if eqn.primitive.name == "name" and root is not None:
                    self.tags.setdefault(root, []).append(eqn.params["name"])
                continue
            for atom in eqn.invars:
                root = None if is_literal(atom) else self._root(atom)
                if root is not None:
                    self.readers.setdefault(root, set()).add(number)

    def _is_view(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name == "iota" or (name in ALIASES and len(eqn.outvars) == 1):
            return True
        return name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype

    def _root(self, var: Any) -> Any:
        return self.roots.get(var, var)

    # -- which equations run as one

    def _units(self) -> list[_Unit]:
        merged = self._merged()
        members: dict[int | tuple[str, bool], list[int]] = {}
        for number in sorted(self.joint.live):
            if number in self.loop_of:
                members.setdefault((self.loop_of[number], number in self.early), []).append(number)
            elif not any(var in self.roots for var in self.eqns[number].outvars):
                members.setdefault(merged[number], []).append(number)
        units = [self._unit(eqns) for eqns in members.values()]
        return sorted(units, key=lambda unit: unit.eqns[-1])

    def _merged(self) -> dict[int, int]:
        """For each equation the last one of the chain that it runs in."""
        end: dict[int, int] = {}
        for number in sorted(self.joint.live, reverse=True):
            end[number] = number
            reader = self._only_reader(number)
            if reader is not None:
                end[number] = end[reader]
        return end

    def _only_reader(self, number: int) -> int | None:
        eqn = self.eqns[number]
        if eqn.primitive.name not in ELEMENTWISE or len(eqn.outvars) != 1 or number in self.loop_of:
            return None
        var = eqn.outvars[0]
        readers = self.readers.get(var, set())
        if len(readers) != 1 or var in self.results:
            return None
        reader = next(iter(readers))
        fusible = self.eqns[reader].primitive.name in ELEMENTWISE | REDUCTIONS and reader not in self.loop_of
        return reader if fusible and (reader in self.early) == (number in self.early) else None

    def _unit(self, eqns: list[int]) -> _Unit:
        last = self.eqns[eqns[-1]]
        loop = self.loop_of.get(eqns[-1], "")
        return _Unit(
            "forward" if eqns[-1] in self.early else "backward",
            eqns,
            loop or module_of(last),
            "scan" if loop else last.primitive.name,
            loop,
        )

    # -- the graph

    def built(self) -> Built:
        unit_of = {number: place for place, unit in enumerate(self._with_carry()) for number in unit.eqns}
        self._values(unit_of)
        storages = self._storages()
        sites = self._op_sites()
        ops = tuple(self._op(place, unit, sites[place]) for place, unit in enumerate(self.units))
        saves = self._saves(ops)
        forward_end = next((op.id for op in ops if op.phase == "backward"), len(ops))
        graph = StepGraph(
            ops=ops, storages=storages, saves=saves, unpack_order=tuple(sorted(range(len(saves)), key=lambda s: saves[s].unpacked_at[0])),
            backwards=(forward_end,), name=self.name, frontend="jax", blocks=self._blocks(),
        )  # fmt: skip
        variables: dict[int, list[Any]] = {}
        for value in self.values.values():
            variables.setdefault(value.id, []).append(value.var)
        names = {storages[self.values[root].id].site: tuple(tags) for root, tags in self.tags.items() if root in self.values}
        return Built(self.joint, graph, {number: tuple(group) for number, group in variables.items()}, self.roots, names)

    def _with_carry(self) -> list[_Unit]:
        """The units, before them one that hands a loop's body its carry."""
        if "carry" in self.given:
            self.units.insert(0, _Unit("forward", [], self.root, "carry"))
        return self.units

    def _values(self, unit_of: dict[int, int]) -> None:
        stays = self._staying()
        for place, var in enumerate(self.joint.given):
            if self.given[place] != "carry" or var in self.readers:
                self.values[var] = self._value(var, 0 if self.given[place] == "carry" else None)
        for var in (*self.joint.jaxpr.constvars, *self.joint.cotangents):
            if var in self.readers:
                self.values[var] = self._value(var, None)
        for place, unit in enumerate(self.units):
            for number in unit.eqns:
                for var in self.eqns[number].outvars:
                    if not is_dropped(var) and (var in stays or self._read_outside(var, place, unit_of)):
                        self.values[var] = self._value(var, place)
        for var, value in self.values.items():
            value.readers = sorted({unit_of[number] for number in self.readers.get(var, ())} - {value.producer})
            value.stays = var in stays
            if value.producer is not None:
                self.makes[value.producer].append(value)
            for reader in value.readers:
                self.reads[reader].append(value)

    def _staying(self) -> set[Any]:
        """Results that stand to the end; of a loop's body only what is carried on: the rest goes into its stack at once."""
        gradients = zip(self.joint.sloped, self.joint.gradients, strict=True)
        wanted = [var for place, var in gradients if place in self.joint.wanted and (not self.root or self.given[place] == "carry")]
        results = self.joint.results[: self.given.count("carry")] if self.root else self.joint.results
        return {self._root(atom) for atom in (*wanted, *results) if not is_literal(atom)}

    def _read_outside(self, var: Any, place: int, unit_of: dict[int, int]) -> bool:
        """Whether an operation makes it for others; a result that nobody reads still stands while it is made."""
        readers = self.readers.get(var, set())
        return not readers or any(unit_of[number] != place for number in readers)

    @staticmethod
    def _value(var: Any, producer: int | None) -> _Value:
        return _Value(var, producer, bytes_of(var.aval), elements_of(var.aval), str(var.aval.dtype))

    def _stack_of(self, value: _Value) -> str:
        """The loop whose stack a value belongs to, '' for none."""
        if value.producer is None or value.stays or not value.readers:
            return ""
        loop = self.units[value.producer].loop
        return loop if loop and all(self.units[reader].loop == loop for reader in value.readers) else ""

    def _storages(self) -> tuple[Storage, ...]:
        end = len(self.units)
        forward_end = next((place for place, unit in enumerate(self.units) if unit.section == "backward"), end)
        groups: dict[Any, list[_Value]] = {}
        for value in self.values.values():
            groups.setdefault(self._stack_of(value) or value.var, []).append(value)
        sites: Counter[str] = Counter()
        made: list[Storage] = []
        for key, group in groups.items():
            for value in group:
                value.id = len(made)
            made.append(self._storage(len(made), group, sites, end, forward_end, stack=isinstance(key, str)))
        return tuple(made)

    def _storage(self, number: int, group: list[_Value], sites: Counter[str], end: int, forward_end: int, *, stack: bool) -> Storage:
        first, count = group[0], sum(value.bytes for value in group)
        if first.producer is None:
            return Storage(id=number, bytes=count, kind=self._kind(first.var), site="", born=-1, dies=max(end, 1), unheld_dies=max(end, 1))
        born, unit = first.producer, self.units[first.producer]
        readers = sorted({reader for value in group for reader in value.readers})
        until = forward_end if self.root and unit.section == "forward" else end
        dies = max([born + 1, *(reader + 1 for reader in readers), *([until] if first.stays else [])])
        if self._is_result(first):
            return Storage(id=number, bytes=count, kind="gradient", writes=(born,), born=-1, dies=max(end, 1), unheld_dies=max(end, 1))
        if unit.section == "backward":
            return Storage(id=number, bytes=count, kind="gradient", producer=born, born=born, dies=dies, unheld_dies=dies)
        inside = max(
            [born + 1, *(reader + 1 for reader in readers if self.units[reader].section == "forward"), *([until] if first.stays else [])]
        )
        site = site_of(unit.module, 0, "stack", 0) if stack else site_of(unit.module, 0, unit.name, sites[f"{unit.module}/{unit.name}"])
        sites[f"{unit.module}/{unit.name}"] += 0 if stack else 1
        return Storage(
            id=number, bytes=count, kind="activation", site=site, producer=born, born=born, dies=dies, unheld_dies=min(inside, dies),
            replayable=self._refusal(unit),
        )  # fmt: skip

    def _is_result(self, value: _Value) -> bool:
        """Whether XLA allocates it before the step begins: gradients have buffers of their own, which nothing else shares."""
        return value.stays and not self.root and value.producer is not None and self.units[value.producer].section == "backward"

    def _kind(self, var: Any) -> Any:
        kinds = dict(zip(self.joint.given, self.given, strict=True))
        return "outside" if var in self.joint.jaxpr.constvars else kinds.get(var, "input")

    def _refusal(self, unit: _Unit) -> str:
        if not unit.eqns:
            return CARRY
        return _EFFECT if any(self.eqns[number].effects for number in unit.eqns) else ""

    def _op_sites(self) -> list[str]:
        taken: Counter[tuple[str, str]] = Counter()
        sites = []
        for unit in self.units:
            name = unit.name if unit.section == "forward" else f"backward.{unit.name}"
            sites.append(site_of(unit.module, 0, name, taken[(unit.module, name)]))
            taken[(unit.module, name)] += 1
        return sites

    def _op(self, place: int, unit: _Unit, site: str) -> Op:
        eqns = [self.eqns[number] for number in unit.eqns]
        reads, makes = self.reads[place], self.makes[place]
        written = [value for value in makes if self._is_result(value)]
        flops = sum(map(flops_of, eqns))
        moved = moved_of(eqns, sum(value.bytes for value in reads), sum(value.bytes for value in makes))
        return Op(
            id=place, site=site, target=unit.name, inputs=tuple(map(self._ref, reads)), outputs=tuple(map(self._ref, makes)),
            mutates=tuple(value.id for value in written),
            seconds=0.0 if unit.loop else seconds_of(eqns, moved, self.rates), flops=flops,
            scratch_bytes=0 if unit.loop else max(map(scratch_of, eqns), default=0),
            flags=("effect",) if any(eqn.effects for eqn in eqns) else (), module=unit.module, phase=unit.section, provenance="modelled",
        )  # fmt: skip

    def _saves(self, ops: tuple[Op, ...]) -> tuple[Save, ...]:
        """One for each backward operation that reads a result of the forward."""
        found: list[Save] = []
        for value in self.values.values():
            if value.producer is not None and self.units[value.producer].section == "forward":
                later = [reader for reader in value.readers if ops[reader].phase == "backward"]
                found.extend(
                    Save(ref=self._ref(value), packed_at=value.producer + 1, unpacked_at=(at,), released_at=at + 1) for at in later
                )
        return tuple(found)

    def _blocks(self) -> tuple[str, ...]:
        """The outermost module paths that are numbered and of which there are several."""
        heads: dict[str, list[str]] = {}
        for unit in self.units:
            parts = unit.module.split(".")
            number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
            if number is not None and unit.section == "forward":
                heads.setdefault(".".join(parts[:number]), []).append(".".join(parts[: number + 1]))
        return tuple(path for paths in heads.values() if len(set(paths)) > 1 for path in dict.fromkeys(paths))

    def _ref(self, value: _Value) -> Ref:
        return Ref(value.id, int(self._is_result(value)), View((value.count,), (1,), 0, value.dtype))
