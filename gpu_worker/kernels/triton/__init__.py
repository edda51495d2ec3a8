"""Kernels for NVIDIA GPUs in Triton, one a module. Only what computes on a GPU imports these modules."""
