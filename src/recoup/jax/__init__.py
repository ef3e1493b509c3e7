"""JAX: record a loss, solve for a budget, run the plan under ``jit``, prove that gradients did not change.

planned = recoup.jax.fit(loss, params, batch, budget="6GiB")  # record, solve, apply, verify
step = jax.jit(jax.value_and_grad(planned))
"""

from recoup.jax.export import maxtext, named_actions, policy
from recoup.jax.fitting import Fitted, fit
from recoup.jax.offload import Link
from recoup.jax.planned import Planned, apply
from recoup.jax.record import record
from recoup.jax.recording import Recording
from recoup.jax.residuals import residual_bytes
from recoup.jax.solving import solve
from recoup.jax.verifying import Verification, verify

__all__ = [
    "Fitted",
    "Link",
    "Planned",
    "Recording",
    "Verification",
    "apply",
    "fit",
    "maxtext",
    "named_actions",
    "policy",
    "record",
    "residual_bytes",
    "solve",
    "verify",
]
