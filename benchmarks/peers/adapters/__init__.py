"""The adapters, one module for each engine."""
