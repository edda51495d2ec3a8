"""Reasoning: what a model writes before its answer."""
