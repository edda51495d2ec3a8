"""Runs the batches of ``/v1/batches``."""
