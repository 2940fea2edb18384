"""The operators: calls into the compiled kernels, and what chooses between those and PyTorch."""
