"""The search for the largest size that fits: on the model of the step, corrected by what is seen of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recoup.errors import InfeasibleBudget, UsageError, VerifyFailure
from recoup.graph.peak import peak_bytes
from recoup.graph.scale import ScaledStep
from recoup.longest.workshop import Trial, Workshop
from recoup.units import format_bytes

__all__ = ["Search", "largest"]

_ROUNDS = 4
_NEAR = 1.1  # how far above the budget a least peak may lie and a plan within it still be looked for
_CAREFUL = 0.01  # by how much a modelled peak may lie above the real one before the model is made anew
_SECANTS = 12  # questions that smooth growth needs at most; after them what is left is halved


def largest(grid: range, peak: Callable[[int], int], budget_bytes: int, start: int) -> int | None:
    """The largest size of a grid with a peak within the budget, for a peak that grows with the size; None if there is none.

    Asks at ``start`` first, then where the secant through the last two answers meets the budget, always between what
    fits and what does not. It ends when those two are neighbours.
    """
    fits, over = -1, len(grid)
    place = (start - grid.start) // grid.step
    asked: list[tuple[int, int]] = []
    while over - fits > 1:
        place = min(max(place, fits + 1), over - 1)
        asked.append((place, peak(grid[place])))
        fits, over = (place, over) if asked[-1][1] <= budget_bytes else (fits, place)
        place = _next_place(asked, budget_bytes)
        if over == len(grid):
            place = min(place, 4 * fits + 4)
        elif len(asked) > _SECANTS:
            place = (fits + over) // 2
    return None if fits < 0 else grid[fits]


def _next_place(asked: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    place, found = asked[-1]
    before, found_before = asked[-2] if len(asked) > 1 else asked[-1]
    if (found - found_before) * (place - before) <= 0:
        return 2 * place + 1 if found <= budget_bytes else place // 2
    return place + (budget_bytes - found) * (place - before) // (found - found_before)


class Search:
    """The search for one answer.

    Attributes:
        scaled: the model of the step.
        excess_bytes: by how much real peaks are known to lie above the modelled ones.
    """

    def __init__(self, workshop: Workshop, scaled: ScaledStep, budget_bytes: int, grid: range) -> None:
        self.workshop = workshop
        self.scaled = scaled
        self.budget_bytes = budget_bytes
        self.grid = grid
        self.excess_bytes = 0
        self._peaks: dict[tuple[int, int], tuple[int, str]] = {}
        self._refused: dict[int, int] = {}

    def least_bytes(self, size: int) -> int:
        """The least peak found at a size: for real if the size was refused, else by the model and what is known of its error."""
        if size in self._refused:
            return self._refused[size]
        allowed = self.budget_bytes - self.excess_bytes
        least, _ = self._peak(size, 1)
        # A solver that looks for a plan within a budget may go below the least peak that it finds without one.
        if allowed < least <= allowed * _NEAR:
            least, _ = self._peak(size, allowed)
        return least + self.excess_bytes

    def _peak(self, size: int, budget_bytes: int) -> tuple[int, str]:
        """Peak of the modelled step's plan within a budget; the least one found and its moment, where there is none."""
        key = (size, budget_bytes)
        if key not in self._peaks:
            try:
                self._peaks[key] = self.workshop.solve(self.scaled.at(size), budget_bytes, size).peak_bytes, ""
            except InfeasibleBudget as error:
                self._peaks[key] = error.least_bytes, error.moment
        return self._peaks[key]

    def unplanned(self, *, bounded: bool) -> tuple[int, float | None]:
        """The largest size whose unplanned step runs within the budget, and its median seconds; 0 and None if none does.

        Raises:
            UsageError: there is no end to what fits, and the grid is not ``bounded`` by the user either.
        """
        excess = 0
        for _ in range(_ROUNDS):
            size = largest(self.grid, self._unplanned_bytes, self.budget_bytes - excess, max(self.scaled.recordings))
            if size is None:
                break
            if size == self.grid[-1] and not bounded:
                raise UsageError(f"the unplanned step fits at any {self.workshop.over}; give the most that makes sense")
            peak, seconds = self.workshop.measured(size)
            if peak <= self.budget_bytes:
                return size, seconds
            excess = peak - self._unplanned_bytes(size)
        return 0, None

    def _unplanned_bytes(self, size: int) -> int:
        return peak_bytes(self.scaled.at(size))

    def planned(self, unplanned_size: int) -> Trial:
        """The largest size that was found to fit, and ran within the budget; what fits unplanned is asked about first.

        Raises:
            InfeasibleBudget: none does.
            VerifyFailure: some should, but their planned steps do not verify.
        """
        grid, best, failure = self.grid, None, None
        for _ in range(_ROUNDS):
            size = largest(grid, self.least_bytes, self.budget_bytes, unplanned_size)
            if size is None or (best is not None and size <= best.size):
                break
            try:
                best = self.workshop.tried(self.scaled, size, self.budget_bytes, self.excess_bytes)
            except (InfeasibleBudget, VerifyFailure) as error:
                failure = error
                grid = range(grid.start, size, grid.step)
                self._refuse(size, error)
            else:
                self._learn(best, unplanned_size)
        if best is None:
            if failure is not None and self.least_bytes(self.grid[0]) <= self.budget_bytes:
                raise failure
            raise self._infeasible()
        return best

    def _refuse(self, size: int, error: InfeasibleBudget | VerifyFailure) -> None:
        """Real peaks are that much higher, everywhere; of a step that does not verify nothing is known of others."""
        if isinstance(error, InfeasibleBudget):
            self._refused[size] = error.least_bytes
            self.excess_bytes = max(self.excess_bytes, error.least_bytes - self._peak(size, 1)[0])

    def _learn(self, found: Trial, unplanned_size: int) -> None:
        """Where the model is too careful there may be room for more: it is made anew from the largest step that can be recorded."""
        size = found.size if found.compared_at == found.size else unplanned_size
        if found.model_error > _CAREFUL and size > max(self.scaled.recordings):
            self.scaled = ScaledStep.through({**self.scaled.recordings, size: self.workshop.recorded(size)}, self.scaled.over)
            self._peaks.clear()

    def _infeasible(self) -> InfeasibleBudget:
        size = self.grid[0]
        least, moment = self.least_bytes(size), self._peak(size, 1)[1]
        return InfeasibleBudget(
            f"no plan of strategy {self.workshop.strategy.name!r} fits {format_bytes(self.budget_bytes)} even at"
            f" {self.workshop.over}={size}: the least peak found there is {format_bytes(least)} ({least} bytes),"
            f" {moment}; allow that much, or try a smaller model",
            budget_bytes=self.budget_bytes,
            least_bytes=least,
            moment=moment,
        )
