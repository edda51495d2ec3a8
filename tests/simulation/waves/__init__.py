"""A simulation of the waves of a data-parallel group: real state machines, and a network that delays."""
