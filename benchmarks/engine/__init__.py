"""Benchmarks of an engine alone: a step's parts, attention, products, memory and throughput."""
