"""A built-in architecture with a feature that its code lacks is computed by transformers' modules, if they have it."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import compute_case, save_random
from tokenloom.gpu_worker.models.load_model import load_model

PROMPTS = [[(i * 7 + j * 3) % 120 + 5 for j in range(length)] for i, length in enumerate((90, 3, 40))]
PHI4_MINI = {
    "pad_token_id": 0,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 128,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "long rope, partly rotated": ("phi3", PHI4_MINI, "partial_rotary_factor must be 1"),
    "activation": ("olmo2", {"hidden_act": "relu6"}, "hidden_act is not supported"),
}


def edit(path: Path, **entries: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, entries, reason = MODELS[name]
    path = save_random(kind, tmp_path, **entries)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with caplog.at_level(logging.WARNING):
        engine = Engine(path, budget=16, max_num_seqs=4, num_blocks=16, max_model_len=128)
    (line,) = [record.getMessage() for record in caplog.records if "slow_modules" in record.getMessage()]
    assert reason in line
    assert engine.core.ready.numerics.endswith(f"transformers-{transformers.__version__}")
    assert_identical([compute_case(model, prompt) for prompt in PROMPTS], engine.generate)
    with pytest.raises(ValueError, match=reason):
        load_model(path, model_impl="native")


def test_the_context_ends_where_the_frequencies_would_change(tmp_path: Path) -> None:
    assert load_model(save_random("phi3", tmp_path, **PHI4_MINI)).config.max_model_len == 128


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"logit_scale": 2.0}, r"config\.json: not supported: logit_scale = 2\.0$"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partly rotated heads are not"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type must be one of .*either: "),
        ({"hidden_act": "nonsense"}, "hidden_act is not supported.*transformers' modules do not compute it either: "),
    ],
    ids=["no entry of the class", "no parameter of the class", "no rope of transformers", "no such activation"],
)
def test_what_neither_knows_is_refused(entries: dict[str, object], reason: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = edit(save_random("llama", tmp_path), **entries)
    with pytest.raises(ValueError, match=reason):
        load_model(path)


def test_without_transformers_the_reason_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edit(save_random("olmo2", tmp_path), hidden_act="relu6")
    for name in [name for name in sys.modules if name.startswith("tokenloom.gpu_worker.models.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"hidden_act is not supported.*tokenloom\[transformers\]"):
        load_model(path)
