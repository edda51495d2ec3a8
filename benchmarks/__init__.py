"""The benchmarks of the engine and of the mesh that `tokenloom bench` runs. Their JSON names the machine."""
