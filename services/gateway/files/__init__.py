"""Stores the files of ``/v1/files`` on disk."""
