"""The limit of descriptors is raised, and clients get a part of it."""

import resource
import subprocess
import sys

import pytest

from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.runtime.host import limits as descriptors
from tokenloom.services.runtime.host.limits import GrpcLimits

_RAISE = """
import logging, resource
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.runtime.host import limits as descriptors
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


@pytest.mark.parametrize(("limit", "connections"), [(192, 128), (1024, 960), (1_048_576, 10_000)])
def test_links_of_the_mesh_are_not_counted_as_clients(
    monkeypatch: pytest.MonkeyPatch, limit: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    options = dict(GrpcLimits(connections=10_000, streams=7).options())
    assert options["grpc.max_allowed_incoming_connections"] == connections
    assert options["grpc.max_concurrent_streams"] == 7


@pytest.mark.parametrize(
    ("limit", "is_enough"), [(0, False), (191, False), (192, True), (resource.RLIM_INFINITY, True)]
)
def test_a_limit_that_is_too_low_is_refused_with_the_need(limit: int, is_enough: bool) -> None:
    if is_enough:
        descriptors.check_limit(limit)
        return
    with pytest.raises(FailedPrecondition, match=rf"is {limit}, and 192 are needed"):
        descriptors.check_limit(limit)


def test_a_part_does_not_start_with_too_few_descriptors() -> None:
    limited = (
        "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    part = (sys.executable, "-m", "tokenloom.services.coordinator", "--listen", "127.0.0.1:0")
    done = subprocess.run((sys.executable, "-c", limited, *part), stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert "the limit of open files is 128, and 192 are needed" in done.stderr
