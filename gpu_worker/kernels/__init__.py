"""C++ kernels of the CPU worker: built ahead or where they run, called through ctypes."""
