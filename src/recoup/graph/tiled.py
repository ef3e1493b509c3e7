"""The step as it is when some of its token-wise regions run in tiles.

A tiled region is one operation in the forward, which saves its input alone, and one in each backward pass that reaches it,
which runs the region's forward once more. What the region made for itself is gone; what single pieces need is scratch of
the two operations. Everything else stays what it was, so that simulator and solvers need to know nothing of tiles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from recoup.errors import PlanMismatch
from recoup.graph.site import op_name
from recoup.graph.step import Op, Ref, Save, StepGraph, Storage
from recoup.graph.tiles import LOSS, TileRegion, scratch_bytes

__all__ = ["MADE_IN_TILES", "demand_tileable", "piece_rows", "tiled"]

MADE_IN_TILES = "made by a call that runs in tiles"
_RENUMBERED = "its number in its module changes when the loss runs in tiles"
# What a piece costs beyond its work, forward and backward, and each of its operations: slicing, calling, a backward pass of its own.
_PIECE_SECONDS = {True: 60e-6, False: 250e-6}
_OP_SECONDS = 20e-6
_WEIGHT_PASSES = 7  # reads and writes of something as large as the weights, for each piece
_BYTES_PER_SECOND = 1e10
_LARGE = 1 << 20

_CACHE_KEY = "_recoup_tiled"


def piece_rows(rows: int, tiles: int) -> int:
    """How many rows a piece has; the last one may have fewer."""
    return max(-(-rows // max(tiles, 1)), 1)


def tiled(graph: StepGraph, tiles: Mapping[str, int]) -> StepGraph:
    """The step with these regions in so many pieces each.

    Args:
        graph: the recorded step.
        tiles: pieces by site of a region, all calls of it alike.

    Raises:
        PlanMismatch: the step has no such region, or the audit refused it.
    """
    if not tiles:
        return graph
    cache: dict[tuple[tuple[str, int], ...], StepGraph] = graph.__dict__.setdefault(_CACHE_KEY, {})
    key = tuple(sorted(tiles.items()))
    if key not in cache:
        demand_tileable(graph, tiles)
        cache[key] = _Tiling(graph, [(region, tiles[region.site]) for region in graph.tileable if region.site in tiles]).graph()
    return cache[key]


def demand_tileable(graph: StepGraph, sites: Iterable[str]) -> None:
    """Passes if the step has these regions, and each of their calls may run in tiles.

    Raises:
        PlanMismatch: it has not; the message says why.
    """
    reasons: dict[str, str] = {}
    for region in graph.tileable:
        reasons[region.site] = reasons.get(region.site) or region.reason
    for site in sites:
        if site not in reasons:
            raise PlanMismatch(f"the plan runs {site} in tiles, but the step {graph.name!r} has no token-wise region of that name")
        if reasons[site]:
            raise PlanMismatch(f"the plan runs {site} in tiles, which the audit refused: {reasons[site]}")


@dataclass(slots=True)
class _Group:
    """Operations that become one, at the place of one of them."""

    region: TileRegion
    tiles: int
    ops: tuple[int, ...]
    place: int
    forward: bool
    number: int = -1


@dataclass(slots=True)
class _Tiling:
    """One rewrite of a graph."""

    old: StepGraph
    chosen: list[tuple[TileRegion, int]]
    groups: list[_Group] = field(default_factory=list)
    group_of: dict[int, _Group] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    number_of: dict[int, int] = field(default_factory=dict)
    outer: dict[int, set[int]] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    floor: int = 0

    def graph(self) -> StepGraph:
        self.bytes_per_second = self._bytes_per_second()
        # What a graph counts at every moment, since the allocator saw more than it knows of, is counted in tiles too.
        self.floor = min(op.scratch_bytes for op in self.old.ops)
        self._group()
        self._number()
        gone = self._gone()
        storages, storage_ids = self._storages(gone)
        saves, save_ids, extra = self._saves(storage_ids)
        ops = tuple(self._ops(storage_ids))
        storages = self._lives(storages, saves, ops)
        added = sum(op.seconds for op in ops) - sum(op.seconds for op in self.old.ops)
        return msgspec.structs.replace(
            self.old,
            ops=ops,
            storages=storages,
            saves=saves,
            unpack_order=self._unpack_order(saves, save_ids, extra),
            backwards=tuple(self._gap(gap) for gap in self.old.backwards),
            step_seconds=self.old.step_seconds + added if self.old.step_seconds else 0.0,
            measured_peak_bytes=None,
            tileable=(),
        )

    # -- operations

    def _group(self) -> None:
        starts = sorted(self.old.backwards)
        for region, count in self.chosen:
            passes: dict[int, list[int]] = {}
            for op in region.backward:
                passes.setdefault(bisect_right(starts, op), []).append(op)
            self.groups.append(_Group(region, count, region.forward, region.forward[-1], True))
            self.groups.extend(_Group(region, count, tuple(ops), ops[0], False) for ops in passes.values())
        for group in self.groups:
            for op in group.ops:
                self.group_of[op] = group

    def _number(self) -> None:
        """New places of what stays, groups at the place of one of theirs."""
        at = {group.place: group for group in self.groups}
        for op in range(len(self.old.ops)):
            if op in at:
                at[op].number = len(self.order)
                self.order.append(op)
            elif op not in self.group_of:
                self.order.append(op)
        self.number_of = {op: number for number, op in enumerate(self.order)}
        self.number_of |= {op: group.number for op, group in self.group_of.items()}

    def _gap(self, gap: int) -> int:
        """The gap before the first operation that stays and was behind that gap."""
        return bisect_left(self.order, gap)

    def _gone(self) -> set[int]:
        """Storages that exist no more: made inside of a region, and nothing outside touches them or takes them over."""
        last = {id(region): max((*region.forward, *region.backward)) for region, _ in self.chosen}
        touched: set[int] = set()
        for op in self.old.ops:
            if op.id not in self.group_of:
                touched.update(ref.storage for ref in (*op.inputs, *op.outputs))
                touched.update(op.mutates)
        gone: set[int] = set()
        for storage in self.old.storages:
            group = None if storage.producer is None else self.group_of.get(storage.producer)
            if group is None or storage.id in touched:
                continue
            outlives = not group.forward and storage.dies > last[id(group.region)] + 1
            others = {id(self.group_of[op].region) for op in self._users(storage.id)} - {id(group.region)}
            if not outlives and not others:
                gone.add(storage.id)
        return gone

    def _users(self, storage: int) -> set[int]:
        if not self.outer:
            for op in self.old.ops:
                for v in {ref.storage for ref in (*op.inputs, *op.outputs)} | set(op.mutates):
                    self.outer.setdefault(v, set()).add(op.id)
        return self.outer.get(storage, set())

    def _ops(self, ids: Mapping[int, int]) -> Iterable[Op]:
        by_place = {group.place: group for group in self.groups}
        for number, op in enumerate(self.order):
            if op in by_place:
                yield self._grouped(by_place[op], ids)
                continue
            old = self.old.ops[op]
            yield msgspec.structs.replace(
                old,
                id=number,
                inputs=tuple(self._ref(ref, ids) for ref in old.inputs),
                outputs=tuple(self._ref(ref, ids) for ref in old.outputs),
                mutates=tuple(ids[v] for v in old.mutates),
            )

    def _grouped(self, group: _Group, ids: Mapping[int, int]) -> Op:
        members = [self.old.ops[op] for op in group.ops]
        made = {ref.storage for op in members for ref in op.outputs if self._maker(self.old.storages[ref.storage]) is group}
        inputs = {ref.storage: ref for op in reversed(members) for ref in op.inputs if ref.storage in ids and ref.storage not in made}
        if not group.forward:
            # The region's own input and what it read beside it are read once more.
            again = [ref for op in group.region.forward for ref in self.old.ops[op].inputs]
            kept = {ref.storage: ref for ref in again if ref.storage in ids and self._is_read_again(ref, group)}
            inputs = kept | inputs
        outputs = {ref.storage: ref for op in members for ref in op.outputs if ref.storage in ids and ref.storage in made}
        mutates = tuple(dict.fromkeys(v for op in members for v in op.mutates if v in ids and v not in made))
        kind = "forward" if group.forward else "backward"
        scratch = scratch_bytes(group.region.samples, piece_rows(group.region.rows, group.tiles))
        return Op(
            id=group.number,
            site=f"{group.region.site}{f'@{group.region.call}' if group.region.call else ''}/tiled_{kind}{_nth(self.groups, group)}",
            target=f"recoup.tiled_{kind}",
            inputs=tuple(self._ref(ref, ids) for ref in inputs.values()),
            constants=(str(group.tiles),),
            outputs=tuple(self._ref(ref, ids, after=True) for ref in outputs.values()),
            mutates=tuple(ids[v] for v in mutates),
            seconds=self._seconds(group),
            flops=sum(op.flops for op in members) + (0 if group.forward else sum(self.old.ops[op].flops for op in group.region.forward)),
            scratch_bytes=self.floor + (scratch[0] if group.forward else scratch[1]),
            module=group.region.site.removesuffix(LOSS),
            call=group.region.call,
            phase="forward" if group.forward else "backward",
            provenance="modelled",
        )

    def _is_read_again(self, ref: Ref, group: _Group) -> bool:
        storage = self.old.storages[ref.storage]
        return (
            storage.producer is None or storage.producer not in self.group_of or self.group_of[storage.producer].region is not group.region
        )

    def _seconds(self, group: _Group) -> float:
        ops = self.old.ops
        pieces = min(group.tiles, group.region.rows)
        own = [ops[op].seconds for op in group.ops]
        again = [] if group.forward else [ops[op].seconds for op in group.region.forward]
        seconds = sum(own) + sum(again) + pieces * (_PIECE_SECONDS[group.forward] + _OP_SECONDS * (len(own) + len(again)))
        if not group.forward:
            # Each piece after the first reads the weights three times more, and makes gradients of them that are added to what stands.
            made = {ref.storage for op in group.ops for ref in ops[op].outputs}
            grads = [self.old.storages[v] for v in made if self._maker(self.old.storages[v]) is group]
            # All that outlives the region but the gradient of its input, which is as large as that.
            rows_bytes = self.old.storages[group.region.source].bytes
            outlive = sum(v.bytes for v in grads if v.kind == "gradient" and v.dies > group.ops[-1] + 1 and v.bytes != rows_bytes)
            seconds += (pieces - 1) * _WEIGHT_PASSES * outlive / self.bytes_per_second
        return seconds

    def _bytes_per_second(self) -> float:
        """How fast large operations without arithmetic to speak of went through memory in this step, fresh memory included."""
        rates = [
            moved / op.seconds
            for op in self.old.ops
            if op.seconds > 0 and not op.flops
            and (moved := sum(self.old.storages[ref.storage].bytes for ref in (*op.inputs, *op.outputs))) >= _LARGE
        ]  # fmt: skip
        return sorted(rates)[len(rates) // 2] if rates else _BYTES_PER_SECOND

    def _ref(self, ref: Ref, ids: Mapping[int, int], *, after: bool = False) -> Ref:
        return Ref(ids[ref.storage], self._version(ref, after), ref.view)

    def _version(self, ref: Ref, after: bool) -> int:
        """The version without the writes that a region did to what it made."""
        storage = self.old.storages[ref.storage]
        version = len([op for op in storage.writes if self.group_of.get(op) is self._maker(storage)]) if after else ref.version
        return len(self._writes(storage, storage.writes[:version]))

    def _maker(self, storage: Storage) -> _Group | None:
        return None if storage.producer is None else self.group_of.get(storage.producer)

    def _writes(self, storage: Storage, writes: tuple[int, ...]) -> list[int]:
        """New places of the writes that are still seen."""
        maker = self._maker(storage)
        seen = [self.number_of[op] for op in writes if maker is None or self.group_of.get(op) is not maker]
        return list(dict.fromkeys(seen))

    # -- storages and saves

    def _storages(self, gone: set[int]) -> tuple[list[Storage], dict[int, int]]:
        ids: dict[int, int] = {}
        kept: list[Storage] = []
        renumbered = self._renumbered()
        for storage in self.old.storages:
            if storage.id in gone:
                continue
            ids[storage.id] = len(kept)
            reason = storage.replayable
            if not reason and storage.producer in self.group_of:
                reason = MADE_IN_TILES
            elif not reason and storage.producer in renumbered:
                reason = _RENUMBERED
            producer = None if storage.producer is None else self.number_of[storage.producer]
            kept.append(
                msgspec.structs.replace(
                    storage,
                    id=len(kept),
                    producer=producer,
                    writes=tuple(self._writes(storage, storage.writes)),
                    born=-1 if storage.born < 0 else self.number_of[storage.born],
                    dies=self._gap(storage.dies),
                    unheld_dies=self._gap(storage.unheld_dies),
                    replayable=reason,
                )
            )
        return kept, ids

    def _renumbered(self) -> set[int]:
        """Operations that count on from some that a tiled loss leaves out of a module call around it."""
        left: dict[tuple[str, int, str], int] = {}
        for region, _ in self.chosen:
            head = region.site.removesuffix(LOSS)
            for op in region.forward if region.site.endswith(LOSS) else ():
                old = self.old.ops[op]
                if (old.module != head and not old.module.startswith(f"{head}.")) or not head:
                    left.setdefault((old.module, old.call, op_name(old.target)), op)
        if not left:
            return set()
        frames = {(module, call) for module, call, _ in left}
        return {
            op.id
            for op in self.old.ops
            if (op.module, op.call) in frames and op.id > left.get((op.module, op.call, op_name(op.target)), len(self.old.ops))
        }

    def _saves(self, ids: Mapping[int, int]) -> tuple[tuple[Save, ...], dict[int, int], dict[int, list[int]]]:
        """What is saved now; new numbers of the old saves that stay as they were; unpackings of what regions save."""
        inside = {save for region, _ in self.chosen for save in region.saves}
        saves: list[Save] = []
        numbers: dict[int, int] = {}
        for number, save in enumerate(self.old.saves):
            if number in inside or save.ref.storage not in ids:
                continue
            numbers[number] = len(saves)
            unpacked = tuple(self._gap(gap) for gap in save.unpacked_at)
            packed = self._gap(save.packed_at)
            released = max(self._gap(save.released_at), packed, *unpacked)
            saves.append(Save(ref=self._ref(save.ref, ids), packed_at=packed, unpacked_at=unpacked, released_at=released))
        extra: dict[int, list[int]] = {}
        groups: dict[int, list[_Group]] = {}
        for group in self.groups:
            groups.setdefault(id(group.region), []).append(group)
        for region, _ in self.chosen:
            forward, *backwards = groups[id(region)]
            places = [group.number for group in backwards]
            for ref in self._read_again(region, ids):
                extra[len(saves)] = places
                end = (places[-1] if places else forward.number) + 1
                saves.append(Save(ref=self._ref(ref, ids), packed_at=forward.number, unpacked_at=tuple(places), released_at=end))
        return tuple(saves), numbers, extra

    def _read_again(self, region: TileRegion, ids: Mapping[int, int]) -> list[Ref]:
        """The region's input, and what else it reads and autograd holds for its backward."""
        held = {self.old.saves[save].ref.storage for save in region.saves} | {region.source}
        refs = [ref for op in region.forward for ref in self.old.ops[op].inputs]
        found = {ref.storage: ref for ref in refs if ref.storage in held and ref.storage in ids}
        own = {v for v in found if self.old.storages[v].producer in region.forward}
        return [ref for v, ref in found.items() if v not in own]

    def _lives(self, storages: list[Storage], saves: tuple[Save, ...], ops: tuple[Op, ...]) -> tuple[Storage, ...]:
        """Every storage outlives its uses, its saves, and, in the forward, itself unsaved."""
        uses, forward_uses = [0] * len(storages), [0] * len(storages)
        for op in ops:
            for v in (*(ref.storage for ref in (*op.inputs, *op.outputs)), *op.mutates):
                uses[v] = op.id + 1
                if op.phase == "forward":
                    forward_uses[v] = op.id + 1
        for save in saves:
            uses[save.ref.storage] = max(uses[save.ref.storage], save.released_at)
        alive = []
        for storage in storages:
            dies = max(storage.dies, uses[storage.id], storage.born + 1)
            unheld = min(max(storage.unheld_dies, forward_uses[storage.id], storage.born + 1), dies)
            alive.append(msgspec.structs.replace(storage, dies=dies, unheld_dies=unheld if not storage.replayable else dies))
        return tuple(alive)

    def _unpack_order(self, saves: tuple[Save, ...], numbers: Mapping[int, int], extra: Mapping[int, list[int]]) -> tuple[int, ...]:
        events: list[tuple[int, int, int]] = []
        turns: dict[int, int] = {}
        for place, old in enumerate(self.old.unpack_order):
            if old in numbers:
                save = numbers[old]
                turn = turns.get(save, 0)
                turns[save] = turn + 1
                events.append((saves[save].unpacked_at[turn], place, save))
        for save, places in extra.items():
            events.extend((gap, -1, save) for gap in places)
        return tuple(save for _, _, save in sorted(events))


def _nth(groups: list[_Group], group: _Group) -> str:
    before = sum(other.region is group.region and not other.forward and other.number < group.number for other in groups)
    return f"#{before}" if before and not group.forward else ""
