"""Which models draft for a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.served_configs import LLAMA, answer, of, write
from tokenloom.engine_core.data.config import SpeculativeConfig

EAGLE_3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
DRAFTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a smaller vocabulary": ("draft_model", LLAMA | {"vocab_size": 31}, "vocabulary has 31 tokens and the model's 32"),
    "a shorter context": ("draft_model", LLAMA | {"max_position_embeddings": 63}, "has 63 tokens and the model's 64"),
    "another dtype": ("draft_model", LLAMA | {"dtype": "bfloat16"}, "is bfloat16 and the model's float32; set dtype"),
    "modules": ("draft_model", of("PhiForCausalLM", "phi"), "draft needs transformers' modules or is an encoder"),
    "an encoder": ("draft_model", of("BertModel", "bert"), "draft needs transformers' modules or is an encoder"),
    "states": ("draft_model", of("BambaForCausalLM", "bamba"), "layers of draft keep a state between tokens"),
    "a class of no library": ("draft_model", of("OddForCausalLM", "odd"), "draft needs transformers' modules"),
    "a head of another size": ("eagle", LLAMA | {"num_hidden_layers": 1, "hidden_size": 8}, "1 layers of size 8"),
    "a head of two layers": ("eagle", LLAMA, "the head has 2 layers of size 16; it needs one of the model's size, 16"),
    "an EAGLE-3 head of another dtype": ("eagle3", EAGLE_3 | {"dtype": "bfloat16"}, "is bfloat16 and the model's"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_model_that_cannot_draft_is_refused_before_a_start(tmp_path: Path, name: str) -> None:
    method, entries, reason = DRAFTS[name]
    speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", entries)))
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, LLAMA | {"num_hidden_layers": 8}, speculative=speculative)
    answer(tmp_path, LLAMA | {"num_hidden_layers": 8})


@pytest.mark.parametrize(
    ("method", "entries", "reason"),
    [
        ("draft_model", {"vocab_size": 31}, "vocabulary has 31 tokens and the model's 32"),
        ("draft_model", {"max_position_embeddings": 63}, "has 63 tokens and the model's 64"),
        ("draft_model", {"dtype": "bfloat16"}, "is bfloat16 and the model's float32"),
        ("eagle", {"num_hidden_layers": 1, "hidden_size": 8}, "1 layers of size 8"),
    ],
)
def test_drafts_for_transformers_modules_are_compared_before_a_start(
    tmp_path: Path, method: str, entries: dict[str, Any], reason: str
) -> None:
    def answered(changed: dict[str, Any]) -> None:
        speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", LLAMA | changed)))
        answer(tmp_path, of("PhiForCausalLM", "phi", dtype="float32"), speculative=speculative)

    with pytest.raises(ValueError, match=reason):
        answered(entries)
    answered({"num_hidden_layers": 1})


def test_models_that_can_draft_pass(tmp_path: Path) -> None:
    for method, entries in (("draft_model", LLAMA), ("eagle", LLAMA | {"num_hidden_layers": 1}), ("eagle3", EAGLE_3)):
        speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", entries)))
        answer(tmp_path, LLAMA | {"num_hidden_layers": 8}, speculative=speculative)


def test_an_eagle_head_needs_embeddings_of_tokens_alone(tmp_path: Path) -> None:
    entries = {name: value for name, value in LLAMA.items() if name != "intermediate_size"}
    opt = entries | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 32}
    head = write(tmp_path / "draft", LLAMA | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="EAGLE heads do not draft for models of the family opt"):
        answer(tmp_path, opt, speculative=SpeculativeConfig(method="eagle", model=str(head)))
