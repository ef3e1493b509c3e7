"""Reference workloads, and what they are measured by: budgets, peers, overheads."""
