"""Embeddings, classes and scores: what is computed from prompts instead of generating text."""
