"""Decides which of several coordinators is the active one: the one that holds the lease."""
