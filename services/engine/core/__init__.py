"""The front's side of the engine core: its process, its requests and each step's outputs."""
