"""Starts the parts of a local mesh, restarts those that end, and stops them in order."""
