"""Pools what a model computed of a prompt: vectors, classes and scores."""
