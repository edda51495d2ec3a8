"""Runs the whole mesh in one process under a virtual clock, a seeded network and seeded faults.

``python -m tests.simulation --seeds 1000`` runs many seeds; the same seed always takes the same course.
"""
