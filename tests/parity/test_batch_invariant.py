"""Log probabilities of batch-invariant engines have the same bits, whatever else is in the batch, however prompts are
cut, with cached prefixes, after preemption, and after another engine has computed their beginning."""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tests.parity.engine import Engine
from tests.parity.reference import DEMO_MODEL, SMALL_CONFIGS, save_random
from tests.parity.speculation import METHODS, answer, drafts_of, make_llm, random_requests
from tokenloom.engine_core.data.config import LoraConfig, SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, Logprobs
from tokenloom.request.adapter_names import adapter_salt

NUM_TOKENS = 12
_RANDOM = random.Random(3)
_LONG = [_RANDOM.randrange(3, 500) for _ in range(390)]
PROMPTS = [
    *(_LONG[:length] for length in (1, 17, 130, 250, 390)),
    *([_RANDOM.randrange(3, 500) for _ in range(length)] for length in (2, 33, 200)),
]
"""Some share their beginnings."""
KINDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"dtype": "bfloat16"}) for name in ("llama", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "mxfp4")),
    *((name, {"dtype": "float32"}) for name in ("demo", "gemma2", "olmo2", "opt", "qwen2_moe", "gpt_oss")),
    ("llama4_text", {"dtype": "float32"}),
    ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    ("mistral", {"dtype": "float32", "kv_cache_dtype": "int8"}),
    ("llama", {"dtype": "bfloat16", "quantization": "int8-dynamic"}),
    ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int4"}),
    ("lora", {"dtype": "float32"}),
]


@dataclass
class Given:
    """What a request got so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=lambda: Logprobs([], []))
    of_prompt: Logprobs = field(default_factory=lambda: Logprobs([], []))


def run(
    engine: Engine, prompts: Sequence[list[int]], accepted: Sequence[list[int]] = (), num_tokens: int = NUM_TOKENS
) -> list[Given]:
    """Compute the prompts at once, every second one with the engine's adapter, if it has one. ``accepted``: tokens of
    each that another engine has drawn."""
    adapters = engine.core.adapters.answer().adapters if engine.core.adapters is not None else ()
    given: dict[str, Given] = {}
    for prompt, begun in zip(prompts, accepted or [[]] * len(prompts), strict=True):
        name = next(engine._names)
        asked = {"logprobs": 5} if begun else {"logprobs": 5, "prompt_logprobs": 2}
        params = CoreSamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, **asked)
        digest = adapters[0].digest if adapters and len(prompt) % 2 else b""
        given[name] = Given(list(begun))
        salt = adapter_salt(b"", digest)
        engine.core.add_request(EngineCoreRequest(name, prompt, params, list(begun), cache_salt=salt, adapter=digest))
    while engine.core.has_work():
        outputs = engine.core.step()
        engine.stats = outputs.scheduler_stats or engine.stats
        for output in outputs.outputs:
            assert not output.error, output.error
            request = given[output.request_id]
            request.tokens += output.new_token_ids
            for to, new in ((request.logprobs, output.new_logprobs), (request.of_prompt, output.new_prompt_logprobs)):
                if new is not None:
                    to.extend(new)
    return list(given.values())


def write(name: str, directory: Path) -> tuple[Path, LoraConfig | None]:
    """Return a small random checkpoint, and its adapter if it has one."""
    if name == "demo":
        return DEMO_MODEL, None
    if name == "mxfp4":
        return write_gpt_oss(directory / name), None
    kind = "qwen3" if name == "lora" else name
    path = save_random(kind, directory, **SMALL_CONFIGS[kind])
    if name != "lora":
        return path, None
    return path, LoraConfig(enable=True, modules=(f"a={save_adapter(directory / 'adapter', path, rank=8, seed=1)}",))


@pytest.mark.parametrize(("name", "options"), KINDS, ids=lambda value: value if isinstance(value, str) else None)
def test_log_probabilities_have_the_same_bits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, lora = write(name, tmp_path)

    def engine(**more: Any) -> Engine:
        settings = {"num_blocks": 400, "num_threads": 2, **options, **more}
        return Engine(model, batch_invariant=True, lora=lora, **settings)

    one = engine()
    alone = [run(one, [prompt])[0] for prompt in PROMPTS]
    assert all(len(each.logprobs.sampled) == NUM_TOKENS for each in alone)
    assert run(one, PROMPTS) == alone
    assert run(engine(budget=7, max_num_seqs=7), PROMPTS) == alone
    cached = engine(prefix_caching=True, budget=100)
    assert run(cached, PROMPTS) == alone
    hits = cached.stats.prefix_cache_hits
    # What asks for a prompt's log probabilities reads no cached prefix, so these come from requests that moved.
    moved = run(cached, PROMPTS, [each.tokens[:5] for each in alone])
    assert cached.stats.prefix_cache_hits > hits
    for request, other in zip(moved, alone, strict=True):
        assert request.tokens == other.tokens
        assert request.logprobs.sampled == other.logprobs.sampled[5:]
        assert request.logprobs.logprobs == other.logprobs.logprobs[5 * 5 :]


def test_also_after_preemption(tmp_path: Path) -> None:
    model, _ = write("llama", tmp_path)
    options: dict[str, Any] = {"batch_invariant": True, "max_model_len": 416, "num_threads": 2, "dtype": "bfloat16"}
    prompts = [_LONG[i : i + 62] for i in range(0, 64, 8)]  # four blocks each, and soon more
    one = Engine(model, **options)
    alone = [run(one, [prompt], num_tokens=60)[0] for prompt in prompts]
    small = Engine(model, num_blocks=34, budget=256, **options)
    assert run(small, prompts, num_tokens=60) == alone
    assert small.stats.num_preemptions > 0


@pytest.mark.parametrize(("name", "options"), KINDS, ids=lambda value: value if isinstance(value, str) else None)
def test_also_with_drafts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, lora = write(name, tmp_path)
    settings: dict[str, Any] = {"num_blocks": 400, "num_threads": 2, "batch_invariant": True, "lora": lora, **options}
    one = Engine(model, **settings)
    alone = [run(one, [prompt])[0] for prompt in PROMPTS]
    drafting = Engine(model, speculative=SpeculativeConfig(method="suffix", num_speculative_tokens=4), **settings)
    drafts = drafting.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine, on which no draft looks as if it paid
    for _ in range(2):  # the second time past answers are drafts
        assert run(drafting, PROMPTS) == alone
    assert drafts.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_also_with_drafts_of_every_method(method: str) -> None:
    options = {"batch_invariant": True, "dtype": "bfloat16"}
    requests = random_requests(5, 40)
    with closing(make_llm(METHODS[method], **options)) as drafting:
        found = answer(drafting, requests)
        assert drafts_of(drafting).stats().num_accepted_tokens > 0
    with closing(make_llm(**options)) as plain:
        expected = answer(plain, requests)
    for one, other in zip(expected, found, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.token_ids, left.text, left.logprobs) == (right.token_ids, right.text, right.logprobs)


def test_other_engines_have_other_bits(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    model, _ = write("llama", tmp_path)
    alone = [run(Engine(model, num_threads=2), [prompt])[0] for prompt in PROMPTS]
    assert run(Engine(model, num_threads=2, budget=7, max_num_seqs=7), PROMPTS) != alone
