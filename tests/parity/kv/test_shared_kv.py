"""Layers that attend to the keys and values of an earlier layer share its blocks."""

from pathlib import Path

import pytest
import torch

from tests.parity.engine import Engine
from tests.soak.models import tiny_configs
from tokenloom.gpu_worker.model_worker import ModelWorker

LAYERS = ["sliding_attention", "full_attention"] * 3
NUM_SHARED = 3


def test_gemma_3n_keeps_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"num_hidden_layers": len(LAYERS), "num_kv_shared_layers": NUM_SHARED}
    monkeypatch.setattr(tiny_configs, "_SHAPES", tiny_configs._SHAPES | entries)
    special = {"layer_types": LAYERS, "activation_sparsity_pattern": None, "tie_word_embeddings": False}
    monkeypatch.setitem(tiny_configs._SPECIAL, "gemma3n_text", special)
    path, model = tiny_configs.save_tiny("gemma3n_text", tmp_path)
    prompt = list(range(3, 70))
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    expected = output[0, len(prompt) :].tolist()
    engine = Engine(path, num_blocks=60, budget=32, max_model_len=120, prefix_caching=True)
    for _ in range(2):
        assert engine.generate([prompt], [12]) == [expected]
    worker = engine.core.executor._worker
    assert isinstance(worker, ModelWorker)
    assert sorted(layer for group in worker._pool_layers.groups for layer in group.layers) == [0, 1, 2]
    caches = worker._require_runner().kv_caches
    owners = [next(first for first, other in enumerate(caches) if other is cache) for cache in caches]
    assert owners == [0, 1, 2, 1, 2, 1]
    separate = Engine(path, num_blocks=60, budget=32, max_model_len=120, groups=False)
    assert separate.generate([prompt], [12]) == [expected]
