"""Provides workers without a model: ``hash`` for tests and ``timed`` for benchmarks."""
