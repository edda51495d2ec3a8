"""The limit of descriptors is raised, and clients get a part of it."""

import resource
import subprocess
import sys

import pytest

from tokenloom.services.runtime.host import descriptors
from tokenloom.services.runtime.host.grpc_limits import GrpcLimits

_RAISE = """
import logging, resource
from tokenloom.services.runtime.host import descriptors
logging.basicConfig(level=logging.INFO)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
assert descriptors.raise_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
assert descriptors.raise_limit() == hard
"""


def test_the_soft_limit_is_raised_and_logged_once() -> None:
    done = subprocess.run((sys.executable, "-c", _RAISE), stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr.count("raised the limit of open descriptors from 200 to ") == 1


@pytest.mark.parametrize(
    ("limit", "wanted", "num_edges", "expected"),
    [
        (1_048_576, 16384, 2, 16384),
        (20_000, 16384, 2, 8750),
        (1024, 16384, 2, 448),
        (1024, 100, 2, 100),
        (100, 16384, 2, 1),
        (resource.RLIM_INFINITY, 16384, 2, 16384),
    ],
)
def test_clients_leave_descriptors_for_the_mesh(
    monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int, num_edges: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.for_clients(wanted, num_edges) == expected


def test_a_grpc_server_gets_what_the_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    options = dict(GrpcLimits(connections=10_000, streams=7).options())
    assert options["grpc.max_allowed_incoming_connections"] == 896
    assert options["grpc.max_concurrent_streams"] == 7
