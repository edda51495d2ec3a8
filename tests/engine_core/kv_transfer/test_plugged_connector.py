"""A connector of another package: it saves and loads blocks, and is part of the layout that engines compare."""

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, tokens_of
from tests.engine_core.kv_transfer.offloading_core import expected, prompt_of
from tests.plugin_packages import EXAMPLE_NAME, install_example
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig, KVConfig
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_service import KVService

SHELF = f"{EXAMPLE_NAME}:shelf"
MARK = f"plugin-{EXAMPLE_NAME}-0.1.0/{SHELF}"
PROMPT = prompt_of(1, 30)


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    yield
    importlib.import_module("tokenloom_example").SHELF.clear()


def config_with(connector: str) -> EngineConfig:
    kv = KVConfig(connector=connector)
    return msgspec.structs.replace(make_config(num_blocks=20), kv=kv, plugins=(EXAMPLE_NAME,))


def make_core(config: EngineConfig) -> EngineCore:
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)
    return EngineCore(config, UniProcExecutor(worker), make_core_kv(config, ()))


def run(core: EngineCore) -> list[int]:
    news = threading.Event()
    core.on_update(news.set)
    core.add_request(make_request("a", PROMPT, 4))
    outputs = []
    while core.has_requests():
        news.clear()
        if not core.has_work():
            assert news.wait(30)
        outputs += core.step().outputs
    return tokens_of(outputs)


def test_two_engines_share_blocks_through_it() -> None:
    cores = [make_core(config_with(SHELF)) for _ in range(2)]
    for core in cores:
        core.scheduler.share_kv(b"weights")
        assert run(core) == expected(PROMPT)
        while len(importlib.import_module("tokenloom_example").SHELF) < 7:
            os.sched_yield()
        core.shutdown()
    stats = cores[1].scheduler.stats()
    assert stats.kv_blocks_received == 7
    assert stats.kv_bytes_received == {"shelf": 7 * 32}


def test_it_is_part_of_the_layout() -> None:
    plain, plugged = (make_core(config_with(connector)) for connector in ("", SHELF))
    assert plugged.ready.kv_layout == f"{plain.ready.kv_layout}/{MARK}"
    assert plugged.ready.numerics == make_core(config_with(SHELF)).ready.numerics
    plugged.shutdown()


def test_engines_with_other_plugins_refuse_each_others_blocks() -> None:
    """Also where only one side has a transport or a connector of another package."""
    core = make_core(config_with(SHELF))
    pool = core.executor.kv_pool()
    for config in (KVConfig(connector=SHELF), KVConfig(transports=(f"{EXAMPLE_NAME}:memory",)), KVConfig()):
        service = KVService(config, [], Failpoints())
        service.register(pool)
        for layout in (pool.layout, core.ready.kv_layout):
            service.receive(KVAcquire(1, b"lease", layout, b"", ["shm"]))
            service.run()
            (answer,) = service.take_events()
            assert isinstance(answer, KVAnswer)
            fits = config.layout_of(pool.layout) == layout
            assert (answer.failure == "layout") is not fits
        service.close()
    core.shutdown()


def test_one_that_is_not_named_is_refused() -> None:
    config = msgspec.structs.replace(config_with(SHELF), plugins=())
    with pytest.raises(ValueError, match=f"kv_connector is {SHELF}: name its package too, with --plugins"):
        config.check_plugins(())
    with pytest.raises(ValueError, match="name its package too"):
        make_core_kv(config, ())
