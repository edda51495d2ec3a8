"""A cluster of Ray in this process."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

QUIET = [
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""Marks of tests that use Ray, which warns of itself."""


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes of a processor each, so that a worker or a core has a node of its own."""
    with machines("", "") as nodes:
        yield nodes


@contextmanager
def machines(*addresses: str) -> Iterator[Any]:
    """A node of one processor, without a dashboard, for each address, such as 127.0.0.2, so that the nodes stand for
    machines; empty: that of this machine. The first one is the head."""
    places = [{"num_cpus": 1} | ({"node_ip_address": each} if each else {}) for each in addresses]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **places[0]})
        for place in places[1:]:
            nodes.add_node(**place)
        driver = {"_node_ip_address": addresses[0]} if addresses[0] else {}
        ray.init(address=nodes.address, log_to_driver=False, **driver)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
