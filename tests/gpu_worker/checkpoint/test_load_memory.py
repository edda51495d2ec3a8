"""Loading a quantized checkpoint takes the memory of its result and of one layer at most."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import write
from tokenloom.gpu_worker.checkpoint import weights
from tokenloom.gpu_worker.checkpoint.gguf.source import GgufSource
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.process.memory import peak_of, return_freed, status_bytes

MIB = 1 << 20
HIDDEN, INNER, LAYERS, VOCABULARY = 256, 2048, 8, 4096
CONFIG = {
    "max_position_embeddings": 64, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INNER,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes |= dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (HIDDEN, HIDDEN))
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    names = {f"model.layers.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in shapes.items()}
    names |= {"model.norm.weight": (HIDDEN,), "model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    random = np.random.default_rng(0)
    tensors = {name: torch.from_numpy(random.random(shape, np.float32) - 0.5) for name, shape in names.items()}
    path = tmp_path_factory.mktemp("memory") / "model.gguf"
    write(path, "llama", CONFIG, tensors, Kind.Q8_0)
    return path


def test_loading_takes_the_result_and_one_layer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(path, "float32")  # what the first model of a process loads stays
    return_freed()
    # The pages of the file do not count: they stay in place here, so that they can be subtracted.
    sources: list[GgufSource] = []
    monkeypatch.setattr(weights, "FORGET_AT", MIB)  # the model is small too
    monkeypatch.setattr(weights, "forget_mapped", lambda addresses: None)
    monkeypatch.setattr(GgufSource, "close", lambda source: sources.append(source))
    matrices = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + 2 * VOCABULARY * HIDDEN  # the output is packed too
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    held = []
    peak = peak_of(lambda: held.append(load_model(path, "float32")))
    print(f"peak {peak / MIB:.1f} MiB, result {4 * matrices / MIB:.1f} MiB, layer {layer / MIB:.1f} MiB")
    most = 4 * matrices + layer + 8 * MIB  # some rows are unpacked at a time, and the allocator keeps a rest
    assert 3 * matrices <= peak <= most


def test_the_file_does_not_stay_in_memory_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FORGET_AT", MIB)
    with Checkpoint(path, torch.bfloat16, torch.device("cpu")) as checkpoint:
        before, most = status_bytes("RssFile"), 0
        for layer in range(LAYERS):
            checkpoint.take(f"model.layers.{layer}.mlp.up_proj.weight", INNER, HIDDEN)
            checkpoint.take(f"model.layers.{layer}.mlp.down_proj.weight", HIDDEN, INNER)
            most = max(most, status_bytes("RssFile") - before)
    assert 2 * LAYERS * INNER * HIDDEN >= 8 * MIB
    assert most <= 4 * MIB
