"""Samples on the device: a step sends what its rows ask for, and kernels change the logits and draw."""
