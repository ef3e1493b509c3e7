"""PyTorch compiled: joint graphs split by a plan for a budget of bytes, under Inductor and with plain ATen kernels."""
