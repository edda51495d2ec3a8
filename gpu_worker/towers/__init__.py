"""Towers turn images into the rows that take the place of embeddings: files into pixels, and pixels into rows."""
