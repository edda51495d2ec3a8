"""The error of a part that does not start."""


class PartFailed(Exception):
    """A part cannot be started; the message says which one and how it ended."""
