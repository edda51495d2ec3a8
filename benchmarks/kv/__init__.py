"""Benchmarks of KV blocks that move between engines."""
