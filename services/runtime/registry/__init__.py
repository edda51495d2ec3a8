"""Follows the registry of the coordinator, for all parts of a mesh that need to know the engines."""
