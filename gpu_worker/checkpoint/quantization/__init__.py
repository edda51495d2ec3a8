"""Reads checkpoints whose linear layers are quantized, one module for each method."""
