"""Devices: what memory they have, and which worker computes on them."""
