"""Compiles all modules once, before the processes that run tests side by side start.

In a fresh clone each of these processes compiled all modules, and rewrote the assertions of all tests, before another
one had written the result: of the seconds of four processes each second one.
"""

import compileall
import os
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

_PRODUCT = ("benchmarks", "engine_core", "gpu_worker", "protos", "services", "tests", "tokenloom", "tools")
_CHUNK = 32


def compile_ahead(config: pytest.Config) -> None:
    """Write the bytecode of the product and of the tests that is missing or stale."""
    if sys.dont_write_bytecode:
        return
    files = [path for folder in _PRODUCT for path in (config.rootpath / folder).rglob("*.py")]
    global _config
    _config = config  # for the processes that are forked
    with get_context("fork").Pool(os.cpu_count()) as pool:
        pool.map(_compile, files, _CHUNK)


_config: pytest.Config


def _compile(path: Path) -> None:
    if not (path.name.startswith("test_") or path.name == "conftest.py"):
        compileall.compile_file(path, quiet=2)
        return
    folder = rewrite.get_cache_dir(path)
    target = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, target) is None and rewrite.try_makedirs(folder):
        with suppress(SyntaxError, ValueError, OSError):  # of a file that is being written; its collection says so
            status, code = rewrite._rewrite_test(path, _config)
            rewrite._write_pyc(_config.stash[rewrite.assertstate_key], code, status, target)
