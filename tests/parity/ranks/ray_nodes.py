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
    """Two nodes of a processor each, without a dashboard, so that a worker or a core has a node of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
