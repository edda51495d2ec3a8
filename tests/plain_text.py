"""What a client of plain HTTP verifies: nothing."""

import ssl

PLAIN_TEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no authority. Clients share it, because httpx otherwise loads all known authorities for each (50 ms)."""
