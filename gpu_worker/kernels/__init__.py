"""C++ kernels of the CPU worker: compiled where they run, called through ctypes."""
