"""Reads configuration and weights of GGUF files in the way that Hugging Face's classes name them."""
