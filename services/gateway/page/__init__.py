"""Serves the page at ``/``: the mesh, a playground, the last ten minutes and the last requests, in a browser."""
