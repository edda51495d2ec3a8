"""Loading checkpoints into transformers' modules."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from tests.gpu_worker.conftest import SaveCheckpoint
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.ops.ops_choice import make_ops


def test_models_are_loaded_one_after_the_other(
    save_checkpoint: SaveCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes its classes while it loads; two loads at the same time would leave them so."""
    path = save_checkpoint("gpt2")
    both_load = threading.Barrier(2)
    load = transformers.GPT2LMHeadModel.from_pretrained

    def wait_for_the_other(*args: Any, **named: Any) -> Any:
        both_load.wait(timeout=0.5)
        return load(*args, **named)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", wait_for_the_other)
    with ThreadPoolExecutor(2) as pool:
        loads = [
            pool.submit(load_model, path, ops=make_ops("auto", torch.device("cpu")), model_impl="transformers")
            for _ in range(2)
        ]
    for each in loads:
        with pytest.raises(ValueError, match="BrokenBarrierError"):
            each.result()
