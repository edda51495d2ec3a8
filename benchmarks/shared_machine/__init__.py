"""A benchmark of an engine that shares its machine with other programs."""
