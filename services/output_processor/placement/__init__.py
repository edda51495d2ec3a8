"""Decides where a request runs: picks of the coordinator, its last snapshot, streams to engines."""
