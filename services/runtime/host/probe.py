"""Checks the health of a container's service.

``python -m tokenloom.services.runtime.host.probe [ADDRESS]`` exits with status 0 if the service is SERVING. ADDRESS is
its health port, by default ``TOKENLOOM_HEALTH_LISTEN``.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SECONDS = 3.0


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 for SERVING, 1 otherwise, 2 for wrong arguments."""
    address = arguments[0] if arguments else os.environ.get("TOKENLOOM_HEALTH_LISTEN", "")
    if len(arguments) > 1 or not address:
        sys.stderr.write("usage: python -m tokenloom.services.runtime.host.probe HOST:PORT\n")
        return 2
    with grpc.insecure_channel(address.replace("0.0.0.0", "127.0.0.1")) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error.code().name}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
