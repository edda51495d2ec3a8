"""Runs the causal language models of the transformers library over the paged KV cache.

Only this folder imports transformers, and only when a model needs it.
"""
