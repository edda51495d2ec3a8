"""Records the calls of kernels on a CPU, and repeats them by one call."""
