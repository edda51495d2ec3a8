from collections.abc import Iterator

import pytest

from tests.engine_core.structured_output.helpers import make_client
from tokenloom.engine_core.client.core_client import InprocClient


@pytest.fixture(scope="package")
def client() -> Iterator[InprocClient]:
    """Provide a core for all tests, so that they share its compilers."""
    client = make_client()
    yield client
    client.close()
