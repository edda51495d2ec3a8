"""Starts the parts of a local mesh, watches over them and stops them in order."""
