"""Finds the engines that have the beginning of a prompt in their KV caches."""
