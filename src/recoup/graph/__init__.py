"""The step graph: data, names, rules, printed form, store. Plain Python, no framework."""

from recoup.graph.step import Kind, Op, Phase, Ref, Save, StepGraph, Storage, View

__all__ = ["Kind", "Op", "Phase", "Ref", "Save", "StepGraph", "Storage", "View"]
