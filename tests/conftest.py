"""What all tests share."""

import os

# Triton reads this when it is imported: the tests of its kernels run them in its interpreter, and a module that another
# test imports must not import Triton first.
os.environ["TRITON_INTERPRET"] = "1"
import triton  # noqa: F401

del os.environ["TRITON_INTERPRET"]  # processes that tests start decide for themselves

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.bytecode import compile_ahead
from tests.turns import of_other_turns
from tokenloom.process.fall_backs import OF_PROCESS

# How long an example takes, or its data, is the machine's affair; what hangs is stopped by the suite's own limit.
settings.register_profile("tokenloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tokenloom")

# Before any import of huggingface_hub: no test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before any import of torch, and for every process that a test starts: the threads of one step wait for each other by
# spinning, so on cores that others use too, two of them take many times as long as one. Where a test wants two, they
# sleep while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# The dear ones first: what begins late must be short, or one of two workers ends long before the other.
FIRST = (
    "tests/e2e",
    "tests/chaos",
    "tests/parity",
    "tests/attack",
    "tests/soak",
    "tests/benchmarks",
    "tests/gpu_worker",
    "tests/mesh",
)
# By the beginning of a test's id, tests that one worker must run because they share a mesh or a reference.
GROUPS = {
    "tests/e2e/test_identical.py": "parity",
    "tests/e2e/test_cli.py": "default mesh",
    "tests/e2e/test_serve.py": "default mesh",
    "tests/parity/test_": "parity",
}


@pytest.fixture(autouse=True)
def no_fall_backs_of_the_process() -> Iterator[None]:
    """Let no test see what another one found to be missing in this process."""
    yield
    for each in OF_PROCESS.active:
        OF_PROCESS.end(each.kind, each.subject)


def group_of(nodeid: str) -> str:
    """Return what the test shares a worker with: its file, or several of them."""
    file = nodeid.partition("::")[0]
    return next((name for start, name in GROUPS.items() if file.startswith(start)), file)


def pytest_configure(config: pytest.Config) -> None:
    """Compiles what processes side by side would each compile, in the one that starts them."""
    if config.getoption("numprocesses", None):
        compile_ahead(config)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has one worker run all tests of a group (``make test``). The marks of xdist's ``--dist loadgroup`` have no effect
    with pytest 9.2: each worker set up the meshes and built the kernels of most files."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests, without those that the given turn leaves out."""
    if turn := os.environ.get("TEST_TURN"):
        others = of_other_turns(items, int(turn))
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: next((i for i, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), 99))


def pytest_collectstart() -> None:
    """Stops the garbage collector: hardly anything that the collection makes is garbage, and walks cost a quarter."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Thousands of test items live to the end: the garbage collector need not walk through them again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for unix sockets: their paths are limited to 107 bytes, which pytest's tmp_path can exceed."""
    path = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
