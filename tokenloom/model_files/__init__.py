"""Finds and reads the files of a model: checkpoint directories, GGUF files, tokenizers and the hub's cache."""
