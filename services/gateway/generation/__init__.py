"""The road of a request: from a job to token ids, and to the stream of its outputs."""
