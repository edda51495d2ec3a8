"""Adapters of every layout that peft writes get the tokens of the merged model, several of them in one batch."""

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import float_config
from tests.gpu_worker.lora.random_adapter import merge, save_adapter
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import compute_case, save_random
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig, SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.lora import adapter
from tokenloom.gpu_worker.lora.adapter import Layout
from tokenloom.request.adapter_names import adapter_salt

LAYOUTS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.(up|gate)_proj": 2},
        "alpha_pattern": {r".*\.down_proj": 3, "layers.0.self_attn.o_proj": 30},
        "target_modules": r".*\.(self_attn|mlp)\.\w+_proj",
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 4}},
    "one_layer": {"kinds": ("q_proj", "down_proj"), "layers_to_transform": [1], "layers_pattern": "layers"},
    "dora": {"use_dora": True},
    "dora_and_biases": {"use_dora": True, "bias": "lora_only", "rank_pattern": {"v_proj": 12}},
    "biases": {"bias": "all", "kinds": ("k_proj", "gate_proj")},
    "bias_of_b": {"lora_bias": True, "kinds": ("q_proj", "k_proj", "v_proj")},
    "trained_layers": {"kinds": ("o_proj",), "modules_to_save": ["k_proj", "down_proj"]},
    "trained_ends": {"kinds": ("v_proj",), "modules_to_save": ["embed_tokens", "lm_head"]},
    "trained_embeddings": {"kinds": ("v_proj",), "modules_to_save": ["embed_tokens"]},
    "tied_embeddings": {"kinds": (), "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embeddings": {"kinds": ("embed_tokens",)},
    "ends": {"kinds": ("embed_tokens", "lm_head", "up_proj"), "save_embedding_layers": False},
}


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, 503, (count,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def case_of(model: Path, prompt: list[int]) -> Case:
    return compute_case(_load(model), prompt)


@functools.cache
def _load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


class Layouts:
    """A random model, an adapter of each layout, and what the merged models make of a prompt."""

    def __init__(self, directory: Path, model: Path, layouts: dict[str, dict[str, Any]]) -> None:
        self.model = model
        self.adapters = {
            name: save_adapter(directory / name, model, rank=4 + seed, seed=seed, **entries)
            for seed, (name, entries) in enumerate(layouts.items())
        }
        merged = {name: merge(model, each, directory / f"merged_{name}") for name, each in self.adapters.items()}
        self.merged = merged
        self.cases = {
            name: case_of(merged.get(name, model), draw(20 + 7 * seed, seed=seed))
            for seed, name in enumerate([*layouts, ""])
        }
        common = [tuple(case_of(path, draw(30, seed=99)).tokens) for path in (*merged.values(), model)]
        assert len(set(common)) == len(common), "an adapter changes nothing"

    def engine(self, **options: Any) -> Engine:
        modules = tuple(f"{name}={path}" for name, path in self.adapters.items())
        return Engine(self.model, lora=LoraConfig(enable=True, max_loras=16, modules=modules), **options)

    def digests(self, engine: Engine) -> dict[str, bytes]:
        """By the names of adapters, and of none."""
        states = engine.core.adapters.answer().adapters  # type: ignore[union-attr]
        return {"": b""} | {state.name: state.digest for state in states}

    def check(self, engine: Engine) -> None:
        """Compare all cases in one step."""
        self.compare(engine)
        assert engine.most_scheduled == len(self.cases)

    def compare(self, engine: Engine) -> None:
        """Compare all cases in one call of the engine."""
        digests = self.digests(engine)
        by_prompt = {tuple(case.prompt): digests[name] for name, case in self.cases.items()}

        def generate(prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
            chosen = [
                next(each for known, each in by_prompt.items() if tuple(prompt[: len(known)]) == known)
                for prompt in prompts
            ]
            return engine.generate(prompts, max_tokens, adapters=chosen)

        assert_identical(list(self.cases.values()), generate)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    directory = tmp_path_factory.mktemp("layouts")
    model = save_random("qwen2", directory)
    return Layouts(directory, model, LAYOUTS)


def test_every_layout_in_one_batch_equals_merged_weights(layouts: Layouts) -> None:
    engine = layouts.engine()
    layouts.check(engine)
    states = {state.name: state.rank for state in engine.core.adapters.answer().adapters}  # type: ignore[union-attr]
    assert states["dora_and_biases"] == 12, "the largest rank of a pattern is the adapter's"


def test_without_kernels(layouts: Layouts, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenloom.gpu_worker.lora import slots

    monkeypatch.setattr(slots, "_load_kernel", lambda device: (None, Layout()))
    layouts.check(layouts.engine())


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)])
def test_over_ranks(shape: tuple[int, int, int], layouts: Layouts, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = layouts.engine(executor=executor, parallel=parallel(*shape))
    layouts.check(engine)
    engine.core.shutdown()


@pytest.mark.parametrize("is_asleep", [False, True])
def test_adapters_follow_weights_that_are_replaced(is_asleep: bool, layouts: Layouts, tmp_path: Path) -> None:
    """Norms and biases are those of the model's own weights, whichever it has."""
    other = tmp_path / "other"
    shutil.copytree(layouts.model, other)
    weights, generator = load_file(other / "model.safetensors"), torch.Generator().manual_seed(8)
    weights = {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    prompt = draw(30, seed=99)
    engine = layouts.engine()
    digests = {state.name: state.digest for state in engine.core.adapters.answer().adapters}  # type: ignore[union-attr]
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    engine.generate([prompt], [4], adapters=[digests["dora"]])
    if is_asleep:
        worker.sleep(2)
    worker.check_weights(str(other))
    worker.reload_weights(str(other))
    if is_asleep:
        worker.wake_up(["kv_cache"])
    for name in ("dora", "dora_and_biases", "biases"):
        case = case_of(merge(other, layouts.adapters[name], tmp_path / name), prompt)
        assert engine.generate([prompt], [24], adapters=[digests[name]]) == [case.tokens[:24]]


def test_chunked_and_preempted(layouts: Layouts) -> None:
    engine = layouts.engine(budget=24, num_blocks=26, max_num_seqs=8, max_model_len=160)
    layouts.compare(engine)
    assert engine.stats.num_preemptions


def test_prefixes_of_an_adapter_are_found_again(layouts: Layouts) -> None:
    engine = layouts.engine(prefix_caching=True)
    layouts.compare(engine)
    assert not engine.stats.prefix_cache_hits, "no adapter has the prefixes of another"
    layouts.compare(engine)
    assert engine.stats.prefix_cache_hits > 16 * len(layouts.cases) / 2


@pytest.mark.parametrize("name", ["dora_and_biases", "ends", "trained_ends"])
def test_drafts_are_verified_by_the_adapters_own_layers(name: str, layouts: Layouts) -> None:
    prompt = draw(400, seed=5)  # so long that most tokens occur in it, and are followed by drafts
    case = case_of(layouts.merged[name], prompt)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    engine = layouts.engine(speculative=drafts)
    (found,) = engine.generate([prompt], [24], adapters=[layouts.digests(engine)[name]])
    assert found == case.tokens[:24]
    assert engine.stats.spec_decoding is not None
    assert engine.stats.spec_decoding.num_draft_tokens > 9


def test_log_probabilities_of_prompts_are_those_of_the_adapter(layouts: Layouts) -> None:
    engine = layouts.engine()
    digests = layouts.digests(engine)
    prompt = draw(20, seed=5)
    params = CoreSamplingParams(max_tokens=1, temperature=0.0, seed=0, stop_token_ids=(), prompt_logprobs=0)
    for name, digest in digests.items():
        salt = adapter_salt(b"", digest)
        engine.core.add_request(EngineCoreRequest(name, prompt, params, cache_salt=salt, adapter=digest))
    found: dict[str, list[float]] = {name: [] for name in digests}
    while engine.core.has_work():
        for output in engine.core.step().outputs:
            if (columns := output.new_prompt_logprobs) is not None:
                found[output.request_id] += columns.sampled
    for name in ("", "ends", "trained_ends", "dora"):
        model = _load(layouts.merged.get(name, layouts.model))
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8-dynamic"}, {"quantization": "int4"}])
def test_any_base_can_have_every_layout(options: dict[str, Any], layouts: Layouts) -> None:
    """A request gets the same tokens alone and beside those with other adapters."""
    engine, prompt = layouts.engine(**options), draw(20, seed=5)
    digests = layouts.digests(engine).values()
    together = engine.generate([prompt] * len(digests), [8] * len(digests), adapters=list(digests))
    assert len(set(map(tuple, together))) > len(digests) // 2
    again = [engine.generate([prompt], [8], adapters=[digest])[0] for digest in digests]
    assert sum(map(list.__ne__, again, together)) <= (0 if "dtype" not in options else 2), "rounding decides few tokens"


FORMATS: dict[str, tuple[formats.Quantize, dict[str, Any]]] = {
    "gptq": (formats.gptq(4, 128, symmetric=True), {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}),
    "awq": (formats.awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}),
    "fp8": (formats.fp8("channel"), float_config("channel")),
}
take_packed = Checkpoint.take_packed


@pytest.mark.parametrize("name", FORMATS)
def test_norms_of_weights_in_few_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the weights that the numbers stand for, of which some rows are unpacked at a time."""
    monkeypatch.setattr(adapter, "_AT_ONCE", 64)
    quantize, config = FORMATS[name]
    model = save_random("qwen3", tmp_path, head_dim=32, hidden_size=128, intermediate_size=256)
    quantized, plain = formats.write(tmp_path / "files", quantize, config, model)
    path = save_adapter(tmp_path / "adapter", plain, use_dora=True)
    case = case_of(merge(plain, path, tmp_path / "merged"), draw(30, seed=1))
    unpacked: list[object] = []

    def take(self: Checkpoint, *args: Any) -> Any:
        unpacked.append(take_packed(self, *args))
        return unpacked[-1]

    monkeypatch.setattr(Checkpoint, "take_packed", take)
    engine = Engine(quantized, lora=LoraConfig(enable=True, modules=(f"one={path}",)))
    assert len([packed for packed in unpacked if packed is not None]) == 14, "of 7 layers in 2 layers of the model"
    (state,) = engine.core.adapters.answer().adapters  # type: ignore[union-attr]
    assert engine.generate([case.prompt], [24], adapters=[state.digest]) == [case.tokens[:24]]
