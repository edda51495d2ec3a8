"""Runs requests: from what a client asks for to token ids, and on to the stream of its outputs."""
