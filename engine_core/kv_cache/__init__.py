"""Manages the paged KV cache: its size, its block pool, block hashes and prefix hits."""
