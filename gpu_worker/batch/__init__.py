"""The rows of a step: block tables, sampling parameters, embeddings and prompt log probabilities."""
