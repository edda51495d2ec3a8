"""``tokenloom serve`` on models other than the demo model, as a user starts and uses it."""

import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.e2e.conftest import Serve
from tests.parity.reference import add_demo_tokenizer, compute_case, save_random
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL

VOCAB_SIZE = load_tokenizer(DEMO_MODEL).get_vocab_size()
MESSAGES: Any = [{"role": "user", "content": "What is prefill?"}]
NUM_TOKENS = 16
_OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20, "num_hidden_layers": 4},
    "phi3": {"pad_token_id": 0},
    "opt": {"max_position_embeddings": 1024, **_OPT},
    "granite": {"head_dim": 16},
}
"""``granite`` is computed by transformers' modules."""


@pytest.mark.parametrize("name", MODELS)
def test_a_chat(name: str, serve: Serve, tmp_path: Path) -> None:
    import transformers

    torch.set_num_threads(1)
    path = add_demo_tokenizer(save_random(name, tmp_path, vocab_size=VOCAB_SIZE, **MODELS[name]))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    mesh = serve(str(path), "--dtype", "float32")
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [name]
        chat: Any = client.chat.completions.create(
            model=name,
            messages=MESSAGES,
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    expected = compute_case(model, chat.prompt_token_ids, NUM_TOKENS).tokens
    assert chat.choices[0].token_ids == expected
    assert chat.choices[0].message.content == load_tokenizer(path).decode(expected)
    assert mesh.stop(signal.SIGTERM) == 0
