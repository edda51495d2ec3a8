"""One running mesh's metrics, for all tests."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability.catalogue import Pages, read_pages


@pytest.fixture(scope="package")
def pages() -> Iterator[Pages]:
    directory = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield asyncio.run(read_pages(directory))
    shutil.rmtree(directory, ignore_errors=True)
