"""Sends the requests of a campaign and compares their answers."""
