"""The 24 releases that CPU users try first, as small checkpoints with the entries of their published ``config.json``.

The list is that of vLLM's recipes for Intel Xeon 6 (August 2026). Each release is served with the tokens of
transformers' class, its text alone where it reads images, or is refused with the reason that belongs to it.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu_worker.checkpoint.quantization import formats
from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import compute_case, small_prompts
from tests.parity.test_text_of_vision import QUANTIZED
from tests.parity.vision_checkpoints import load_vision, write_vision
from tests.soak.models.releases import (
    BY_CLASS,
    IN_FP8,
    OF_VISION,
    RELEASES,
    TRANSCRIBES,
    ask,
    try_release,
    try_transcripts,
    try_vision,
)

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
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-35B-A3B",
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
    "google/diffusiongemma-26B-A4B-it": "is a diffusion model",
}


def test_the_list_is_whole() -> None:
    assert len({*BUILT_IN, *BY_MODULES, *TRANSCRIBES, *REFUSED}) == 24


@pytest.mark.parametrize("name", [*BUILT_IN, *BY_MODULES])
def test_a_release_is_served_with_the_tokens_of_its_class(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    row = (try_vision if name in OF_VISION else try_release)(name, tmp_path)
    assert row.by == ("built in" if name in BUILT_IN else "transformers")
    assert name in RELEASES or "--language-model-only" in row.reason


@pytest.mark.parametrize("name", IN_FP8)
def test_a_release_in_fp8_is_served_as_published(name: str, tmp_path: Path) -> None:
    """Which the list of CPU users does not hold."""
    torch.set_num_threads(1)
    assert "FP8" in try_release(name, tmp_path).reason


@pytest.mark.parametrize("name", TRANSCRIBES)
def test_a_release_writes_down_speech(name: str, tmp_path: Path) -> None:
    assert ask(name, tmp_path).by == try_transcripts().by == "built in"


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_is_refused_by_its_reason(name: str, tmp_path: Path) -> None:
    assert name in BY_CLASS
    row = ask(name, tmp_path)
    assert (row.by, REFUSED[name] in row.reason) == ("", True)


# With these blocks two of the longest requests do not fit: of layers with windows each group takes blocks of its own.
@pytest.mark.parametrize(
    ("kind", "num_blocks"), [("gemma4_e2b", 45), ("gemma4_26b_a4b", 45), ("llama4", 60), ("muse_glimmer", 60)]
)
def test_preemption_changes_no_token(kind: str, num_blocks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = write_vision(kind, tmp_path)
    model = load_vision(path)
    cases = [compute_case(model, prompt, 16) for prompt in small_prompts(503) * 2]
    engine = Engine(path, language_model_only=True, budget=48, num_blocks=num_blocks, max_model_len=288)
    assert_identical(sorted(cases, key=lambda case: -len(case.prompt)), engine.generate)
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", ["FP8 channels", "W4A16"])
def test_llama_4_may_store_quantized_experts_one_by_one(name: str, tmp_path: Path) -> None:
    """As RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic and -quantized.w4a16 do (``for_llm_compressor``)."""
    torch.set_num_threads(1)
    path = write_vision("llama4", tmp_path)
    _, quantize, config = QUANTIZED[name]
    split = _copied(path, tmp_path / "split", _split(load_file(path / "model.safetensors")))
    kept = ("vision_model.", "multi_modal_projector.", "language_model.lm_head")
    ignored = ["re:.*lm_head", "re:vision_model.*", "re:multi_modal_projector.*"]
    quantized, plain = formats.write(tmp_path / "files", quantize, config | {"ignore": ignored}, split, kept)
    rounded = load_file(plain / "model.safetensors")
    joined = {stored: _joined(stored, rounded) for stored in load_file(path / "model.safetensors")}
    model = load_vision(_copied(path, tmp_path / "joined", joined))
    cases = [compute_case(model, prompt, 12) for prompt in small_prompts(503, 128)]
    assert_identical(cases, Engine(quantized, language_model_only=True).generate)


def _copied(path: Path, other: Path, tensors: dict[str, Tensor]) -> Path:
    other.mkdir()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    shutil.copy(path / "config.json", other)
    return other


def _split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the matrices of each expert, [out, in]."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, matrix = name.rpartition(".")
        if matrix not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        parts = {"down_proj": tensor}
        if matrix == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=-1), strict=True))
        for part, matrices in parts.items():
            found |= {f"{prefix}.{i}.{part}.weight": each.t().contiguous() for i, each in enumerate(matrices)}
    return found


def _joined(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The tensor of this name in the published file, from those of :func:`_split`."""
    prefix, _, matrix = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(matrix)
    if parts is None:
        return tensors[name]
    count = sum(each.startswith(f"{prefix}.") and each.endswith(f"{parts[0]}.weight") for each in tensors)
    each = [torch.cat([tensors[f"{prefix}.{i}.{part}.weight"] for part in parts]).t() for i in range(count)]
    return torch.stack(each).contiguous()
