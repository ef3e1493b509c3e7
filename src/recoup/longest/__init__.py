"""The largest size of a step that fits a memory budget: found on a model of the step, then run for real."""

from recoup.longest.entry import Longest, longest

__all__ = ["Longest", "longest"]
