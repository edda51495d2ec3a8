"""``LLM`` over models that are not the demo model: those that transformers' modules compute."""

from pathlib import Path

import pytest
import torch

from tests.parity.reference import add_demo_tokenizer, compute_case, save_random
from tokenloom import LLM, SamplingParams
from tokenloom.checkpoint import DEMO_MODEL, load_tokenizer

PROMPTS = ["Once upon a time there was a dog that", "The cat"]
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
VOCAB_SIZE = load_tokenizer(DEMO_MODEL).get_vocab_size()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def generate(path: Path) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt and of its output."""
    llm = LLM(str(path), dtype="float32", max_model_len=128, num_kv_blocks=64, max_num_batched_tokens=16)
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


def test_a_model_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    path = add_demo_tokenizer(save_random("bloom", tmp_path, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4))
    with pytest.raises(Exception, match="BloomForCausalLM is not supported: it computes attention or state by itself"):
        LLM(str(path), max_model_len=128, num_kv_blocks=64)
