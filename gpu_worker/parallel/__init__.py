"""Lets several workers compute one model: each a part of every layer, a part of the layers, or both."""
