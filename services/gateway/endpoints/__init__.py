"""Runs the requests of an API that generates: reads the body, and writes JSON or a stream of events."""
