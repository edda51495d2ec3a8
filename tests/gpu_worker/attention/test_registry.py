"""Backends by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenloom.gpu_worker.attention.reference import ReferenceBackend
from tokenloom.gpu_worker.attention.registry import make_attention_backend
from tokenloom.gpu_worker.attention.torch_backend import TorchBackend

CONFIG: Any = SimpleNamespace()


@pytest.mark.parametrize(("name", "kind"), [("torch", TorchBackend), ("reference", ReferenceBackend)])
def test_by_name(name: str, kind: type) -> None:
    assert type(make_attention_backend(name, CONFIG, 16, torch.device("cpu"))) is kind


def test_unknown() -> None:
    with pytest.raises(ValueError, match="must be one of torch, reference, not 'flash'"):
        make_attention_backend("flash", CONFIG, 16, torch.device("cpu"))
