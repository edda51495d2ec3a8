"""``LLM`` over models that are not the demo model: those that transformers' modules compute, and OPT as the hub has
it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.reference import add_demo_tokenizer, compute_case, save_random
from tests.parity.vision_checkpoints import load_vision, write_vision
from tokenloom import LLM, SamplingParams
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL

PROMPTS = ["Once upon a time there was a dog that", "The cat"]
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
VOCAB_SIZE = load_tokenizer(DEMO_MODEL).get_vocab_size()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def generate(path: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt and of its output."""
    llm = LLM(str(path), dtype="float32", max_model_len=128, num_kv_blocks=64, max_num_batched_tokens=16, **options)
    try:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally:
        llm.close()
    return [(list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) for output in outputs]


@pytest.mark.parametrize("kind", ["gemma", "granite"])
def test_models_that_transformers_computes(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = add_demo_tokenizer(save_random(kind, tmp_path, vocab_size=VOCAB_SIZE, head_dim=16))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    tokenizer = load_tokenizer(path)
    for text, (prompt, tokens) in zip(PROMPTS, generate(path), strict=True):
        assert prompt == tokenizer.encode(text).ids
        assert tokens == compute_case(model, prompt, NUM_TOKENS).tokens


def test_the_text_of_a_model_that_reads_images(tmp_path: Path) -> None:
    path = add_demo_tokenizer(write_vision("qwen2_5_vl", tmp_path, VOCAB_SIZE))
    model = load_vision(path)
    for prompt, tokens in generate(path, language_model_only=True):
        assert tokens == compute_case(model, prompt, NUM_TOKENS).tokens
    for prompt, tokens in generate(path):
        assert tokens == compute_case(model, prompt, NUM_TOKENS).tokens
    path = add_demo_tokenizer(write_vision("llava_next", tmp_path, VOCAB_SIZE))
    with pytest.raises(Exception, match="serve its text alone with --language-model-only"):
        generate(path)


def test_opt_as_the_hub_has_it(tmp_path: Path) -> None:
    """Half precision in one pickled file, under the names of the first release; the files of a slow tokenizer."""
    from transformers import AutoModelForCausalLM

    path = save_random(
        "opt",
        tmp_path,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        init_std=0.2,
        dtype=torch.float16,
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(path / "model.safetensors")
    names = {name: name.removeprefix("model.") for name in tensors}
    pickled = {names[name]: tensor for name, tensor in tensors.items()}
    pickled["lm_head.weight"] = pickled["decoder.embed_tokens.weight"]
    torch.save({**pickled, "decoder.version": torch.tensor([3.0])}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    (path / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    for prompt, tokens in generate(path):
        assert tokens == compute_case(model, prompt, NUM_TOKENS).tokens


def test_a_model_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    path = add_demo_tokenizer(save_random("bloom", tmp_path, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4))
    with pytest.raises(Exception, match="BloomForCausalLM is not supported: it computes attention or state by itself"):
        LLM(str(path), max_model_len=128, num_kv_blocks=64)
