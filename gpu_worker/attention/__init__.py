"""Attention over the paged KV cache: an interface and its backends."""
