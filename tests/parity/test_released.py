"""The 24 releases that CPU users try first, as small checkpoints with the entries of their published ``config.json``.

The list is that of vLLM's recipes for Intel Xeon 6 (August 2026). Each release is served with the tokens of
transformers' class, its text alone where it reads images, or is refused with the reason that belongs to it.
"""

from pathlib import Path

import pytest
import torch

from tests.soak.models.releases import BY_CLASS, OF_VISION, RELEASES, ask, try_release, try_vision

BUILT_IN = (
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "microsoft/Phi-4-reasoning",
    "openai/gpt-oss-20b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "meta-models/Muse-Glimmer-30B",
)
BY_MODULES = (
    "ibm-granite/granite-3.2-2b-instruct",
    "zai-org/glm-4-9b-hf",
    "google/gemma-4-E2B-it",
    "google/gemma-4-E4B-it",
    "google/gemma-4-26B-A4B-it",
    "microsoft/Phi-4-multimodal-instruct",
)
REFUSED = {
    "Qwen/Qwen3.5-4B": "reads images or sound",  # and keeps states between tokens
    "Qwen/Qwen3.5-35B-A3B": "reads images or sound",
    "openai/whisper-large-v3": "has an encoder and a decoder",
    "google/diffusiongemma-26B-A4B-it": "is a diffusion model",
}


def test_the_list_is_whole() -> None:
    assert len({*BUILT_IN, *BY_MODULES, *REFUSED}) == 24


@pytest.mark.parametrize("name", [*BUILT_IN, *BY_MODULES])
def test_a_release_is_served_with_the_tokens_of_its_class(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    row = (try_vision if name in OF_VISION else try_release)(name, tmp_path)
    assert row.by == ("built in" if name in BUILT_IN else "transformers")
    assert name in RELEASES or "--language-model-only" in row.reason


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_is_refused_by_its_reason(name: str, tmp_path: Path) -> None:
    assert name in BY_CLASS
    row = ask(name, tmp_path)
    assert (row.by, REFUSED[name] in row.reason) == ("", True)
