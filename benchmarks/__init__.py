"""Benchmarks of the engine and of the mesh: what `tokenloom bench` runs. Their JSON names the machine."""
