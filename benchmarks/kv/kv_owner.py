"""Runs the process whose blocks ``bench kv`` reads: the owner's side of every way."""

import argparse
import json
import sys
from dataclasses import replace

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

from .kv_shape import SHAPES, Shape

_SECONDS = 3600.0
"""Longer than a measurement takes."""


def transports(ways: list[str]) -> dict[str, KVTransport]:
    """Maps the names of the ways to transports. A name is a transport's name, with its medium in brackets."""
    made: dict[str, KVTransport] = {}
    for way in ways:
        if way == "socket (tcp)":
            made[way] = SocketTransport("127.0.0.1:0")
        else:
            (made[way],) = make_transports([way.partition(" ")[0]])
    return made


def command(shape: Shape, ways: list[str]) -> list[str]:
    """Start the owner of a pool of this shape."""
    return [sys.executable, "-m", __name__, shape.name, str(shape.pool_bytes), *ways]


def serve(shape: Shape, ways: list[str]) -> None:
    """Print where the blocks are, and wait until standard input ends."""
    pool = shape.make_pool(shared=True)
    shape.fill(pool)
    served = transports(ways)
    endpoints = {way: (transport.serve(pool) or b"").hex() for way, transport in served.items()}
    for transport in served.values():
        transport.attend(_SECONDS)
    print(json.dumps(endpoints), flush=True)
    sys.stdin.read()
    for transport in served.values():
        transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=[shape.name for shape in SHAPES])
    parser.add_argument("pool_bytes", type=int)
    parser.add_argument("ways", nargs="+")
    options = parser.parse_args()
    (shape,) = (shape for shape in SHAPES if shape.name == options.shape)
    serve(replace(shape, pool_bytes=options.pool_bytes), options.ways)


if __name__ == "__main__":
    main()
