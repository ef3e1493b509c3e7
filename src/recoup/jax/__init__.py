"""JAX: record a loss, solve for a budget, run the plan under ``jit``, prove that gradients did not change."""

from recoup.jax.planned import Planned, apply
from recoup.jax.record import record
from recoup.jax.recording import Recording
from recoup.jax.residuals import residual_bytes
from recoup.jax.solving import solve

__all__ = ["Planned", "Recording", "apply", "record", "residual_bytes", "solve"]
