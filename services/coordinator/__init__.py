"""Implements the coordinator, which knows the engines and chooses one for each request."""
