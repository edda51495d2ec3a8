"""Injects faults into a running mesh and compares its answers with those of an undisturbed run."""
