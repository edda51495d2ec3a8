"""Measures what grows with the number of engines and of output processors."""
