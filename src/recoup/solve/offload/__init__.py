"""Choosing what to keep, to recompute and to offload together."""

from recoup.solve.offload.joint import Joint, joint_of
from recoup.solve.offload.routes import Routes, routes_of

__all__ = ["Joint", "Routes", "joint_of", "routes_of"]
