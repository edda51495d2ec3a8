"""Executors: what the core computes steps with, wherever its workers are."""
