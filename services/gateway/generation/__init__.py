"""Runs requests: from a job to token ids, and on to the stream of its outputs."""
