"""``tokenloom serve`` on models other than the demo model, as a user starts and uses it."""

import json
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.e2e.conftest import Serve
from tests.parity.reference import add_demo_tokenizer, compute_case, save_random
from tests.parity.vision_checkpoints import load_vision, write_vision
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


PARTS_ONLY = """{%- for message in messages -%}
{{- message.role.upper() + ': ' -}}
{%- for part in message.content if part.type == 'image' -%}{{- '<|image_pad|>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text + ' ' -}}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"""
"""Reads the content of a turn as a list of parts only, as the templates of LLaVA do."""


def test_the_text_of_a_model_that_reads_images(serve: Serve, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    image = VOCAB_SIZE
    path = add_demo_tokenizer(write_vision("qwen2_5_vl", tmp_path, VOCAB_SIZE + 4, image_token_id=image))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"added_tokens_decoder": {str(image): {"content": "<|image_pad|>", "special": True}}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").unlink()
    (path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_ONLY}))
    model = load_vision(path)
    mesh = serve(str(path), "--dtype", "float32", "--language-model-only")
    options: Any = {"model": path.name, "temperature": 0, "max_tokens": NUM_TOKENS}
    more = {"return_token_ids": True, "ignore_eos": True}
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        spelled: Any = [{"role": "user", "content": "Say <|image_pad|> twice."}]
        chat: Any = client.chat.completions.create(messages=spelled, extra_body=more, **options)
        assert image not in chat.prompt_token_ids
        assert chat.choices[0].token_ids == compute_case(model, chat.prompt_token_ids, NUM_TOKENS).tokens
        prompt = [5, 6, image, image, 7]
        done: Any = client.completions.create(prompt=prompt, extra_body=more, **options)
        assert done.choices[0].token_ids == compute_case(model, prompt, NUM_TOKENS).tokens
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        shown: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        with pytest.raises(openai.BadRequestError, match="image_url") as refused:
            client.chat.completions.create(messages=shown, **options)
        assert refused.value.param == "messages[0].content[1].image_url"
    assert mesh.stop(signal.SIGTERM) == 0
