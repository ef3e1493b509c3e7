"""Sites: the names of operations and storages that last from step to step and from run to run.

A site is ``module.path@call/op#n:output``. ``@call`` is left out for the module's first call in a step, ``#n`` for
the first operation of that name in the call, ``:output`` for the first output; the path is empty for what runs in
no module. A *pattern* names a range of identical layers: ``layers.[0-11].mlp/gelu``, ``layers.[0-3,5].mlp/gelu``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["collapse", "collapse_pairs", "expand", "op_name", "site_of"]

_RANGE = re.compile(r"\[([0-9,\-]+)\]")
_INDEX = re.compile(r"(?<=\.)[0-9]+(?=[.@/])|^[0-9]+(?=[.@/])")


def op_name(target: str) -> str:
    """``aten.addmm.default`` as ``addmm``, ``aten.add.Tensor`` as ``add.Tensor``; other namespaces keep their own."""
    return target.removeprefix("aten.").removesuffix(".default")


def site_of(module: str, call: int, name: str, nth: int, output: int = 0) -> str:
    """The site of an operation, or of one of its outputs."""
    path = f"{module}@{call}" if call else module
    return f"{path}/{name}" + (f"#{nth}" if nth else "") + (f":{output}" if output else "")


def expand(pattern: str) -> tuple[str, ...]:
    """The sites that a pattern names, in order.

    Raises:
        ValueError: a range is malformed.
    """
    match = _RANGE.search(pattern)
    if match is None:
        return (pattern,)
    head, tail = pattern[: match.start()], pattern[match.end() :]
    rest = expand(tail)
    return tuple(f"{head}{number}{suffix}" for number in _numbers(match[1]) for suffix in rest)


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low or (dash and not high):
            raise ValueError(f"malformed range [{text}]")
        numbers.extend(range(int(low), int(high or low) + 1))
    return numbers


def collapse(sites: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Sites grouped into patterns over the first layer index, in order of first appearance.

    Each entry is the pattern and the sites it names, so that ``expand(pattern)`` gives just those sites.
    """
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for site in sites:
        match = _INDEX.search(site)
        if match is None:
            groups[(site, "")] = [(-1, site)]
        else:
            groups.setdefault((site[: match.start()], site[match.end() :]), []).append((int(match[0]), site))
    collapsed: list[tuple[str, tuple[str, ...]]] = []
    for (head, tail), members in groups.items():
        members.sort()
        numbers = [number for number, _ in members]
        if numbers[0] < 0:
            collapsed.append((head, (members[0][1],)))
        elif len(numbers) == 1:
            collapsed.append((members[0][1], (members[0][1],)))
        else:
            collapsed.append((f"{head}[{_ranges(numbers)}]{tail}", tuple(site for _, site in members)))
    return collapsed


def collapse_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Pairs of sites grouped into patterns: site, companion, and the sites named.

    The companion is one site (or ``''``) for the whole group, or a range that runs with the sites, layer by layer.
    """
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for site, companion in pairs:
        groups.setdefault((*_shape(site), _relative(site, companion)), []).append((site, companion))
    collapsed: list[tuple[str, str, tuple[str, ...]]] = []
    for members in groups.values():
        companions = dict(members)
        for pattern, sites in collapse(companions):
            beside = dict.fromkeys(companions[site] for site in sites)
            collapsed.append((pattern, next(iter(beside)) if len(beside) == 1 else collapse(beside)[0][0], sites))
    return collapsed


def _shape(site: str) -> tuple[str, str]:
    match = _INDEX.search(site)
    return (site, "") if match is None else (site[: match.start()], site[match.end() :])


def _relative(site: str, companion: str) -> str:
    """The companion with the layer index that it shares with the site written as ``*``; as it is if it shares none."""
    here, there = _INDEX.search(site), _INDEX.search(companion)
    if here is None or there is None or here[0] != there[0]:
        return companion
    return f"{companion[: there.start()]}*{companion[there.end() :]}"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
