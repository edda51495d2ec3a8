"""Takes the socket of a connection that was just accepted, so that the TLS handshake can begin after it was counted."""

import asyncio
import os
import socket
from typing import cast


def take_socket(transport: asyncio.BaseTransport) -> socket.socket:
    """Return the socket of a transport, which ends without the connection. To be called in ``connection_made``, before
    anything was read; the caller closes the socket or hands it to ``connect_accepted_socket``.

    ``start_tls`` is no alternative: it loses what the event loop has read before it is called, and uvloop reads a
    ClientHello that is there already as soon as ``connection_made`` has returned.
    """
    taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    taken.setblocking(False)
    cast(asyncio.Transport, transport).abort()
    return taken
