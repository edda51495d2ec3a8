"""What all tests share."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair; what hangs is stopped by the suite's own limit.
settings.register_profile("tokenloom", deadline=None)
settings.load_profile("tokenloom")

# Before any import of huggingface_hub: no test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_collection_finish() -> None:
    """Thousands of test items live to the end: the garbage collector need not walk through them again and again."""
    gc.freeze()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for unix sockets: their paths are limited to 107 bytes, which pytest's tmp_path can exceed."""
    path = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
