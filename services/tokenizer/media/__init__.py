"""Computes what stands for images in prompts from their sizes alone, without pixels."""
