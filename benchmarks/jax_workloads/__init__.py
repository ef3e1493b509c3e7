"""JAX steps to plan: each module's ``workload(**sizes)`` returns a loss and its arguments."""
