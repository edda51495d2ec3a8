"""The memory, processors and copies of the device that a worker computes on."""
