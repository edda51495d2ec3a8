"""Measures how a coordinator that stands by takes the place of one that is killed."""
