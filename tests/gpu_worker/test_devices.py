"""Which worker a device's name means, and what is said where there is no such device."""

import pytest
import torch

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.devices import CPUWorker, make_worker
from tokenloom.gpu_worker.platform.platform import kv_share
from tokenloom.model_files.model_path import DEMO_MODEL


def config(device):
    return EngineConfig(worker=WorkerConfig(model=str(DEMO_MODEL), device=device))


def test_cpu_is_always_there():
    assert isinstance(make_worker(config("cpu")), CPUWorker)


@pytest.mark.parametrize(("device", "words"), [("cuda", "finds no GPU"), ("tpu", "device must be one of")])
def test_a_device_that_is_not_there_is_named(device, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=words):
        make_worker(config(device))


def test_auto_is_the_cpu_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(make_worker(config("auto")), CPUWorker)


@pytest.mark.parametrize(
    ("free", "activations", "share"), [(80, 0, 70), (80, 5, 65), (20, 0, 10), (5, 0, 0), (20, 15, 0)]
)
def test_kv_gets_nine_tenths_less_what_is_in_use(free, activations, share):
    assert kv_share(free, 100, 90, activations) == share


def test_engines_on_one_gpu_divide_it():
    assert kv_share(free=80, total=100, usable=90, activations=5, num_engines=3, own=10) == 15
    assert (
        kv_share(free=20, total=100, usable=90, activations=5, num_engines=3, own=10) == 5
    )  # the others hold the rest
