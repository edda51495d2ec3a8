"""Measures requests, and counts what is used by key and by adapter."""
