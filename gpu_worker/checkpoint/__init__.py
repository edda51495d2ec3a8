"""A checkpoint's files: its configuration and its weights."""
