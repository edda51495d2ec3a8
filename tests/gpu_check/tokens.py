"""The tokens that the demo model gave on a CPU in float32, and their log probabilities: eagerly, from graphs, alone,
with steps that overlap, and with requests that are preempted."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu_check.driver import Driver, Requests
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import GPU, Target
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.model_files.model_path import DEMO_MODEL

REFERENCES = Path(__file__).parent / "references.json"
_NUM_TOKENS = 24
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "frequency_penalty": 0.5},
)
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 127, 200)
_NUM_TEXTS, _TEXT_TOKENS = 10, 220
_MOST_GAP = 2e-2
"""The largest mean difference of a log probability in bfloat16."""
_MOST_GAP_FLOAT32 = 1e-4


def requests() -> Requests:
    """Prompts of many lengths, half of them greedy."""
    return {
        f"{index}": (
            [(7 * index + 11 * place) % 1900 + 50 for place in range(length)],
            CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=index, **_KINDS[index % len(_KINDS)]),
        )
        for index, length in enumerate(_LENGTHS)
    }


def text_prompts() -> Requests:
    """Short prompts, whose continuations are the texts."""
    params = CoreSamplingParams(max_tokens=_TEXT_TOKENS, seed=7, temperature=0.7)
    return {
        f"text {index}": ([(13 * index + 3 * i) % 1900 + 50 for i in range(8)], params) for index in range(_NUM_TEXTS)
    }


def references() -> dict[str, Any]:
    """Each request alone, on the CPU in float32, and texts of the model with the log probability of each token."""
    driver = Driver(DEMO_MODEL, device="cpu", max_num_seqs=16, max_model_len=256, dtype="float32")
    driver.start()
    tokens = {name: driver.generate({name: wanted}, _NUM_TOKENS)[name] for name, wanted in requests().items()}
    prompts = text_prompts()
    continued = driver.generate(prompts, _TEXT_TOKENS)
    texts = [prompts[name][0] + continued[name] for name in prompts]
    logprobs = [[round(each, 5) for each in row] for row in _logprobs(driver, texts)]
    return {"tokens": tokens, "texts": texts, "logprobs": logprobs}


def run(rows: Rows, target: Target = GPU) -> None:
    expected, wrong = json.loads(REFERENCES.read_text()), list[str]()
    for dtype in ("float32", "bfloat16"):
        for eager in (True, False):
            wrong += _with_driver(rows, target, expected, dtype, eager=eager)
        for name, options in (("async", {"async_scheduling": True}), ("preempted", {"num_blocks": 40})):
            wrong += _with_core(rows, target, expected["tokens"], dtype, name, **options)
    if wrong:
        raise SystemExit(f"differs from a CPU: {', '.join(wrong)}")


def _with_driver(rows: Rows, target: Target, expected: dict[str, Any], dtype: str, *, eager: bool) -> list[str]:
    driver = Driver(
        DEMO_MODEL,
        device=target.device.type,
        max_num_seqs=16,
        max_model_len=256,
        dtype=dtype,
        enforce_eager=eager,
    )
    driver.start()
    found = driver.generate(requests(), _NUM_TOKENS)
    alone = driver.generate({"5": requests()["5"]}, _NUM_TOKENS)
    gap = _gap(_logprobs(driver, expected["texts"]), expected["logprobs"])
    driver.worker.shutdown()
    different = sum(found[name] != tokens for name, tokens in expected["tokens"].items())
    changed, name = int(alone["5"] != found["5"]), f"tokens, {dtype}, {'eager' if eager else 'graphs'}"
    rows.add(name, requests=len(found), different=different, different_when_alone=changed, mean_logprob_gap=gap)
    exact = dtype == "float32"
    wrong = different > 0 if exact else False
    return [name] if wrong or not gap <= (_MOST_GAP_FLOAT32 if exact else _MOST_GAP) else []


def _with_core(
    rows: Rows,
    target: Target,
    expected: dict[str, list[int]],
    dtype: str,
    name: str,
    *,
    async_scheduling: bool = False,
    num_blocks: int = 200,
) -> list[str]:
    """Compute the requests with an engine core, whose scheduler preempts some if the blocks do not suffice."""
    try:
        from tokenloom.engine_core.core import EngineCore
        from tokenloom.engine_core.data.messages import EngineCoreRequest
        from tokenloom.engine_core.executor.make_executor import make_executor
    except ImportError as error:
        rows.skip(f"tokens, {dtype}, {name}", str(error))
        return []
    config = EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL), device=target.device.type, dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=16, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, async_scheduling=async_scheduling),
        max_model_len=256,
    )
    core = EngineCore(config, make_executor(config, make_worker))
    for key, (prompt, params) in requests().items():
        core.add_request(EngineCoreRequest(key, prompt, params))
    found: dict[str, list[int]] = {key: [] for key in expected}
    while core.has_work():
        for output in core.step().outputs:
            found[output.request_id] += output.new_token_ids
    preemptions = core.scheduler.stats().num_preemptions
    core.shutdown()
    different = sum(found[key] != tokens for key, tokens in expected.items())
    name = f"tokens, {dtype}, {name}"
    rows.add(name, requests=len(found), different=different, preemptions=preemptions)
    return [name] if different and dtype == "float32" else []


def _logprobs(driver: Driver, texts: list[list[int]]) -> list[list[float]]:
    """Return the log probability of each token of each text but the first."""
    params = CoreSamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
    found = []
    for index, text in enumerate(texts):
        output = driver.begin_step({f"{index}": (text, params)}, room=0)
        found.append(list(output.prompt_logprobs[f"{index}"].sampled))
        driver.end([f"{index}"])
    return found


def _gap(found: list[list[float]], expected: list[list[float]]) -> float:
    pairs = [pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs)


def main(make: Callable[[], dict[str, Any]] = references) -> None:
    """Write the references anew."""
    REFERENCES.write_text(json.dumps(make()) + "\n")
    print(f"{REFERENCES} is written", file=sys.stderr)


if __name__ == "__main__":
    main()
