"""Benchmarks of a whole mesh: served load, prefill/decode disaggregation and the accuracy check."""
