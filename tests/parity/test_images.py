"""Prompts with images get the tokens of transformers' whole classes, however the work is batched, cut or interrupted,
with rows from transformers' towers."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.whole_vision import FAMILIES
from tests.gpu_worker.cuda.late_platform import LatePlatform, use_tensor_backend
from tests.gpu_worker.lora.random_adapter import merge, save_adapter
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.identical import assert_identical
from tests.parity.images import ImageEngine, ImageReference, image_reference, make_image_reference, reference_of
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig, SpeculativeConfig, WorkerConfig
from tokenloom.engine_core.data.model_info import MediaTraits
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker import devices
from tokenloom.gpu_worker.devices import make_worker

BLOCK_SIZE = 16


@pytest.fixture(params=FAMILIES)
def reference(request: pytest.FixtureRequest) -> ImageReference:
    return image_reference(request.param)


def check(reference: ImageReference, engine: ImageEngine) -> None:
    assert_identical(reference.cases, engine.generate)


def test_at_once_and_again_over_the_prefix_cache(reference: ImageReference) -> None:
    """Where the prefix cache has an image, its rows are not asked for again."""
    engine = ImageEngine(reference, prefix_caching=True, num_blocks=600)
    check(reference, engine)
    asked, hits = engine.num_asked, engine.stats.prefix_cache_hits
    check(reference, engine)
    assert engine.stats.prefix_cache_hits > hits
    assert engine.num_asked - asked <= 2 < asked  # of images that end in blocks that are not full


def test_chunks_that_cut_images(reference: ImageReference) -> None:
    """Those that are seen as a whole are not cut."""
    longest = max(len(each.rows) for prompt in reference.prompts for each in prompt.pictures)
    budget = longest + 8 if reference.media.seen_whole else 24
    check(reference, ImageEngine(reference, budget=budget, max_num_seqs=8, num_blocks=600))


def test_preemption(reference: ImageReference) -> None:
    num_groups = ImageEngine(reference, num_blocks=600).core.ready.num_kv_groups
    blocks = (-(-reference.longest // BLOCK_SIZE) + 1) * num_groups
    options = {"budget": max(96, reference.longest // 2), "max_num_seqs": 8, "max_model_len": reference.longest}
    engine = ImageEngine(reference, num_blocks=blocks, **options)
    check(reference, engine)
    assert engine.stats.num_preemptions > 0


CONTROLS = [
    *((kind, "one_key") for kind in ("llava", "qwen2_5_vl", "gemma3", "pixtral")),
    *((kind, "without_grid") for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")),
    *((kind, "causal") for kind in ("gemma3", "gemma4_26b_a4b")),
]


@pytest.mark.parametrize(("kind", "control"), CONTROLS)
def test_what_is_left_out_is_noticed(kind: str, control: str) -> None:
    engine = ImageEngine(image_reference(kind), prefix_caching=True, num_blocks=600, **{control: True})
    cases = image_reference(kind).cases
    found = [engine.generate([case.prompt], [len(case.tokens)])[0] for case in cases]
    different = sum(tokens != case.tokens for tokens, case in zip(found, cases, strict=True))
    assert different >= (1 if control == "one_key" else 3)
    assert found[-1] == cases[-1].tokens  # the prompt without images


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_other_backends(kind: str, backend: str) -> None:
    engine = ImageEngine(image_reference(kind), attention_backend=backend, num_blocks=600, prefix_caching=True)
    assert engine.attention_backend == backend
    check(image_reference(kind), engine)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen3_vl"])
def test_with_graphs_of_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a platform that is always behind the host: decode steps come from graphs, which know one shift of a row."""
    use_tensor_backend(monkeypatch)
    platform = LatePlatform()
    monkeypatch.setattr(devices, "CPUPlatform", lambda: platform)
    reference = image_reference(kind)
    engine = ImageEngine(reference, num_blocks=300, budget=64, max_num_seqs=8, attention_backend="torch")
    check(reference, engine)
    assert platform.capture.num_replays > 20


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_batch_invariant_engines(kind: str) -> None:
    reference = image_reference(kind)
    whole = ImageEngine(reference, batch_invariant=True, num_blocks=600)
    check(reference, whole)
    budget = 40 if reference.media.seen_whole else 24
    cut = ImageEngine(reference, batch_invariant=True, num_blocks=600, budget=budget, max_num_seqs=3)
    prompts, limits = [case.prompt for case in reference.cases], [24] * len(reference.cases)
    seeded = {"temperature": 1.0}
    assert cut.generate(prompts, limits, **seeded) == whole.generate(prompts, limits, **seeded)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_keys_and_values_of_8_bits(kind: str) -> None:
    """Tokens do not depend on how the work is cut, as far as rounding to 8 bits lets them."""
    reference = image_reference(kind)
    prompts, limits = [case.prompt for case in reference.cases], [24] * len(reference.cases)
    alone = ImageEngine(reference, kv_cache_dtype="int8", max_num_seqs=1, num_blocks=600)
    expected = alone.generate(prompts, limits)
    cut = ImageEngine(reference, kv_cache_dtype="int8", budget=24, max_num_seqs=8, num_blocks=600)
    found = cut.generate(prompts, limits)
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(prompts) - 1
    exact = sum(tokens[:4] == case.tokens[:4] for tokens, case in zip(expected, reference.cases, strict=True))
    assert exact >= len(prompts) - 1


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_drafts_of_the_prompt(kind: str) -> None:
    speculative = SpeculativeConfig("ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    engine = ImageEngine(image_reference(kind), speculative=speculative, num_blocks=600)
    check(image_reference(kind), engine)
    assert engine.num_accepted > 0


def test_drafts_of_a_model_that_reads_text(tmp_path: Path) -> None:
    """It rotates by the same positions, and sees a token of its own in place of an image's."""
    reference = image_reference("qwen2_5_vl")
    draft = save_random("qwen2", tmp_path, vocab_size=308, max_position_embeddings=2048)
    speculative = SpeculativeConfig("draft_model", num_speculative_tokens=3, model=str(draft))
    check(reference, ImageEngine(reference, speculative=speculative, num_blocks=600))


def test_drafts_of_a_head(tmp_path: Path) -> None:
    """An EAGLE head with random weights rotates by the positions of the model, though its own pairs have one axis."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 308}
    sizes |= {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    shapes = {"fc": (64, 128), "layers.0.self_attn.q_proj": (64, 64), "layers.0.self_attn.o_proj": (64, 64)}
    shapes |= dict.fromkeys(("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"), (32, 64))
    shapes |= dict.fromkeys(("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"), (96, 64))
    shapes |= {"layers.0.mlp.down_proj": (64, 96)}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    save_file(tensors | {"layers.0.post_attention_layernorm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    reference = image_reference("qwen2_5_vl")
    speculative = SpeculativeConfig("eagle", num_speculative_tokens=3, model=str(tmp_path))
    check(reference, ImageEngine(reference, speculative=speculative, num_blocks=600, budget=24, max_num_seqs=8))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma3", "llava"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 3, 1)])
def test_several_ranks(kind: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    """Of a pipeline, each stage adds only the levels that follow its own layers."""

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = ImageEngine(image_reference(kind), executor=executor, parallel=parallel(*shape), budget=64, num_blocks=300)
    check(image_reference(kind), engine)
    engine.core.shutdown()


def test_a_window_may_be_shorter_than_an_image() -> None:
    """Others let the tokens of such an image see only earlier ones."""
    reference = make_image_reference("gemma3", text_config={"sliding_window": 9})
    for backend in ("cpu", "torch"):
        check(reference, ImageEngine(reference, attention_backend=backend, prefix_caching=True, num_blocks=600))
    engine = ImageEngine(reference, causal=True, num_blocks=600)
    found = engine.generate([case.prompt for case in reference.cases], [24] * len(reference.cases))
    assert sum(tokens != case.tokens for tokens, case in zip(found, reference.cases, strict=True)) >= 3


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_sequences_that_are_spread_over_ranks(kind: str, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    reference = image_reference(kind)
    engine = ImageEngine(reference, executor=executor, parallel=parallel(2, 1, 2), budget=40, num_blocks=300)
    check(reference, engine)
    engine.core.shutdown()


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_in_bfloat16_first_tokens_are_those_of_float32(kind: str) -> None:
    reference = image_reference(kind)
    prompts, limits = [case.prompt for case in reference.cases], [2] * len(reference.cases)
    budget = 64 if reference.media.seen_whole else 40
    found = ImageEngine(reference, dtype="bfloat16", budget=budget, num_blocks=600).generate(prompts, limits)
    equal = sum(tokens[0] == case.tokens[0] for tokens, case in zip(found, reference.cases, strict=True))
    assert equal >= len(prompts) - 2


def test_adapters_beside_images(tmp_path: Path) -> None:
    """Of a family whose tower has no layers of the adapter's names: its rows are the same with and without it."""
    path = image_reference("qwen3_vl").path
    adapter = save_adapter(tmp_path / "adapter", path)
    reference = reference_of("qwen3_vl", path, merge(path, adapter, tmp_path / "merged"))
    lora = LoraConfig(enable=True, max_loras=1, modules=(f"one={adapter}",))
    engine = ImageEngine(reference, lora=lora, budget=40, num_blocks=600, prefix_caching=True)
    (state,) = engine.core.adapters.answer().adapters  # type: ignore[union-attr]
    assert_identical(reference.cases, functools.partial(engine.generate, adapter=state.digest))
    assert_identical(image_reference("qwen3_vl").cases, engine.generate)  # without the adapter


def test_modules_of_transformers_show_whole_images_too() -> None:
    reference = image_reference("gemma3")
    check(reference, ImageEngine(reference, model_impl="transformers", num_blocks=600))


def test_the_id_of_an_image_may_lie_above_the_vocabulary() -> None:
    reference = image_reference("llava")
    above = reference.with_ids(100_000)
    engine = ImageEngine(above, num_blocks=600)
    check(above, engine)
    engine.generate([above.cases[0].prompt], [2], prompt_logprobs=2)


def test_text_alone_has_no_images() -> None:
    def traits(kind: str, **options: bool) -> MediaTraits | None:
        worker = WorkerConfig(model=str(image_reference(kind).path), num_threads=1, **options)
        return make_worker(EngineConfig(worker=worker)).load_model().media

    assert traits("llava") == MediaTraits(("image",))
    assert traits("qwen3_vl") == MediaTraits(("image", "video"), levels=3)
    assert traits("llava", language_model_only=True) is None
