"""Engines of several ranks give the same tokens from recordings as without, whichever way ranks exchange tensors."""

import shutil
from pathlib import Path

import pytest

from tests.gpu_worker.cpu_graphs.steps import have_logits
from tests.gpu_worker.cpu_graphs.test_engines import DEMO_MODEL, generate
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.gpu_worker.cpu_graphs.recorded_model import RecordedModel
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.parallel import torch_group as shared_group

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def make_core(shape: tuple[int, int], directory: Path, *, eager: bool) -> EngineCore:
    config = EngineConfig(
        worker=WorkerConfig(model=DEMO_MODEL, num_threads=1, enforce_eager=eager),
        cache=CacheConfig(num_blocks=22),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128),
        parallel=parallel(*shape),
        max_model_len=256,
    )
    directory.mkdir()
    return EngineCore(config, RankThreads(config, directory))


def recordings(core: EngineCore) -> list[RecordedModel | None]:
    assert isinstance(core.executor, RankThreads)
    found = []
    for worker in core.executor.workers:
        assert isinstance(worker, ModelWorker)
        assert worker._runner is not None
        recorded = worker._runner._recordings
        assert recorded is None or isinstance(recorded, RecordedModel)
        found.append(recorded)
    return found


@pytest.mark.parametrize(("shape", "memory"), [((2, 1), "shared"), ((2, 1), "sockets"), ((1, 2), "sockets")])
def test_ranks_run_recordings(
    shape: tuple[int, int], memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "sockets":
        monkeypatch.setattr(shared_group, "load_sums", _unavailable)
    cores = [make_core(shape, tmp_path / str(eager), eager=eager) for eager in (True, False)]
    expected, found = (generate(core) for core in cores)
    assert found == expected
    assert expected["preemptions"] > [0]
    assert recordings(cores[0]) == [None] * (shape[0] * shape[1])
    for recorded in recordings(cores[1]):
        assert recorded is not None
        assert recorded.num_recordings > 3
        assert have_logits(recorded)
    for core in cores:
        core.shutdown()


def _unavailable() -> None:
    raise KernelsUnavailable("no compiler")
