"""Holds the services of the mesh, one folder each, and the code that they share (``runtime``)."""
