"""Runs campaigns of faults against a mesh and summarizes them."""
