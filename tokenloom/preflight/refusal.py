"""The error that every check raises."""


class CannotServe(Exception):
    """Ends the start. The message is one sentence that names the file or option, and the way out."""
