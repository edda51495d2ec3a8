"""Computes the figures that ``tools/house.py`` prints. The product does not import this package."""
