"""Checks what ``tokenloom serve`` is given before it starts a process; none of it imports torch."""
