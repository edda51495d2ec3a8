"""Explores what happens between two awaits: real code under an event loop that chooses who runs, who is cancelled and
which write is the last one."""
