"""Each entry of ``config.json`` that the source of transformers' class reads, turned off, on, empty or to another
number: it is computed as that class does, or refused.

A model that is loaded without one of its features answers nonsense and raises no error. The words for "off" are the
worst: an entry that is on where it is absent, such as ``is_causal``, asks for something by being false.
"""

import ast
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint import weights
from tokenloom.gpu_worker.encoders.encoder import load_encoder
from tokenloom.gpu_worker.models import load_model as loading
from tokenloom.gpu_worker.models.load_model import load_model

CPU = torch.device("cpu")
IDS = [(i * 7) % 400 + 3 for i in range(40)]
IDS[5:8] = [0, 1, 2]  # the usual numbers of padding and of the ends of a text

_TINY = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
_WINDOW = {"sliding_window": 16}
DECODERS = SMALL_CONFIGS
_ENCODER = _TINY | {"intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 503, "initializer_range": 0.3}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {},
    "camembert": {},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
}

# Shared code of the library reads these for every class (masking_utils.py, modeling_utils.py, generic layers).
_SHARED = {"is_causal", "is_decoder", "add_cross_attention", "is_encoder_decoder", "tie_word_embeddings"}
_SHARED |= {
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "attention_chunk_size",
    "use_bidirectional_attention",
}
_OTHERWISE_TESTED = {"vocab_size", "rope_parameters", "text_config", "vision_config", "get_text_config"}


def entries_of(kind: str) -> list[str]:
    """Return the entries that a class reads: attributes of ``config``, and names in ``getattr(config, name)``."""
    module = kind.replace("-", "_").removesuffix("_text")
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}").__file__
    assert source is not None
    found = set(_SHARED)
    for node in ast.walk(ast.parse(Path(source).read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(attr="config"), attr=name):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return sorted(name for name in found - _OTHERWISE_TESTED if not name.startswith("_"))


def flips(config: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield configurations with other values of an entry, or without it."""
    old, values = config.get(name), [None, False, True, 0]
    if isinstance(old, int | float) and not isinstance(old, bool):
        values.append(old * 2)
    elif isinstance(old, list | str):
        values += [[], "relu"]
    for value in values:
        if name not in config or type(value) is not type(old) or value != old:
            yield config | {name: value}
    if name in config:
        yield {each: value for each, value in config.items() if each != name}


@pytest.fixture(autouse=True)
def quick_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load thousands of models of some kilobytes: without threads that look for kernels, nor a look at all mappings."""
    torch.set_num_threads(1)
    monkeypatch.setattr(loading, "_kernels", lambda config: [])
    monkeypatch.setattr(weights, "forget_mapped", lambda addresses: None)


def decoder(path: Path) -> Tensor:
    """Return the logits [40, vocab_size] of the built-in class."""
    model, count = load_model(path, "float32", model_impl="native"), len(IDS)
    backend = make_attention_backend("reference", model.config, 16, CPU)
    blocks = np.arange(-(-count // 16))
    plan = backend.plan(np.array([0, count]), np.array([count]), blocks[None], np.arange(count))
    hidden = model.forward(torch.tensor(IDS), torch.arange(count), backend.allocate(len(blocks)), plan)
    return model.compute_logits(hidden).float()


def encoder(path: Path) -> Tensor:
    """Return the hidden states [40, hidden_size] of the built-in class."""
    count = len(IDS)
    types = torch.zeros(count, dtype=torch.int64)
    return load_encoder(path, "float32").forward(torch.tensor(IDS), torch.arange(count), types, [0, count]).float()


def reference(auto: Any, path: Path) -> Tensor | None:
    """Return what transformers computes; None: it does not load such a file."""
    try:
        model, report = auto.from_pretrained(path, attn_implementation="eager", output_loading_info=True)
        if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return None
        found: Tensor = model(torch.tensor([IDS]))[0][0]
    except Exception:  # classes and their configurations check values in many ways
        return None
    return found


@torch.inference_mode()
def compare(path: Path, kind: str, auto: Any, ours: Callable[[Path], Tensor]) -> list[str]:
    """Return the entries that are computed otherwise than transformers does, with their values."""
    file, wrong = path / "config.json", []
    config = json.loads(file.read_text())
    expected = reference(auto, path)
    assert expected is not None
    assert (ours(path) - expected).abs().max() < 1e-3
    computed = 0
    for name in entries_of(kind):
        for changed in flips(config, name):
            file.write_text(json.dumps(changed))
            try:
                found = ours(path)
            except ValueError:
                continue  # refused
            expected = reference(auto, path)
            if expected is not None:
                computed += 1
                if found.shape != expected.shape or not (found - expected).abs().max() < 1e-3:
                    wrong.append(f"{name} = {changed.get(name, 'absent')}")
    assert computed > 10
    return wrong


@pytest.mark.parametrize("kind", DECODERS)
def test_entries_of_a_decoder_are_computed_or_refused(kind: str, tmp_path: Path) -> None:
    path = save_random(kind, tmp_path, **DECODERS[kind] | (_WINDOW if "sliding_window" in DECODERS[kind] else {}))
    assert compare(path, kind, transformers.AutoModelForCausalLM, decoder) == []


@pytest.mark.parametrize("kind", ENCODERS)
def test_entries_of_an_encoder_are_computed_or_refused(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **_ENCODER | ENCODERS[kind]))
    model.save_pretrained(tmp_path)
    assert compare(tmp_path, kind, transformers.AutoModel, encoder) == []
