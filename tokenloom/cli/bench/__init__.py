"""The ``bench`` commands."""
