"""Trains the picture model, a small model that answers questions about drawn shapes."""
