"""The tokens that the demo model gave on a CPU in float32: one request at a time, together, eagerly and from graphs."""

import json
import sys
from pathlib import Path

from tests.gpu_check.driver import Driver, Requests
from tests.gpu_check.rows import Rows
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.model_path import DEMO_MODEL

REFERENCES = Path(__file__).parent / "references.json"
_NUM_TOKENS = 24
_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "frequency_penalty": 0.5},
)
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 127, 200)


def requests() -> Requests:
    """Prompts of many lengths, half of them greedy."""
    return {
        f"{index}": (
            [(7 * index + 11 * place) % 1900 + 50 for place in range(length)],
            SamplingParams(max_tokens=_NUM_TOKENS, seed=index, **_KINDS[index % len(_KINDS)]),
        )
        for index, length in enumerate(_LENGTHS)
    }


def references() -> dict[str, list[int]]:
    """Each request alone, on the CPU in float32."""
    driver = Driver(DEMO_MODEL, device="cpu", max_num_seqs=1, max_model_len=256, dtype="float32")
    driver.start()
    return {name: driver.generate({name: wanted}, _NUM_TOKENS)[name] for name, wanted in requests().items()}


def run(rows: Rows, device: str = "cuda") -> None:
    expected = json.loads(REFERENCES.read_text())
    wrong = 0
    for dtype, eager in (("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)):
        driver = Driver(DEMO_MODEL, device=device, max_num_seqs=16, max_model_len=256, dtype=dtype, eager=eager)
        driver.start()
        found = driver.generate(requests(), _NUM_TOKENS)
        alone = driver.generate({"5": requests()["5"]}, _NUM_TOKENS)
        different = sum(found[name] != tokens for name, tokens in expected.items())
        changed = int(alone["5"] != found["5"])
        name = f"tokens, {dtype}, {'eager' if eager else 'graphs'}"
        rows.add(name, requests=len(found), different=different, different_when_alone=changed)
        wrong += different if dtype == "float32" else 0
        driver.worker.shutdown()
    if wrong:
        raise SystemExit(f"{wrong} requests in float32 have other tokens than on a CPU")


if __name__ == "__main__":
    REFERENCES.write_text(json.dumps(references()) + "\n")
    print(f"{REFERENCES} is written", file=sys.stderr)
