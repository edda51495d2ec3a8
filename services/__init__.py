"""The services of the mesh, one folder each, and what they share (``runtime``)."""
