"""One module for each engine."""
