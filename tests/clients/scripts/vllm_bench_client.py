"""``vllm bench serve``: random prompts over completions and chats; every request succeeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 32


def main() -> None:
    rates = []
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        rates.append(f"{run(backend, path):.0f} tokens/s over {path}")
    print()  # after what vLLM's libraries say at their end
    print(f"{2 * REQUESTS} requests, 8 at a time: " + ", ".join(rates))


def run(backend: str, path: str) -> float:
    result = f"{backend}.json"
    command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", backend, "--endpoint", path]
    command += ["--base-url", os.environ["TOKENLOOM_URL"], "--model", os.environ["TOKENLOOM_MODEL"]]
    command += ["--tokenizer", os.environ["TOKENLOOM_CHECKPOINT"], "--dataset-name", "random"]
    command += ["--random-input-len", "64", "--random-output-len", "32", "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", "8", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", os.environ["OUT"], "--result-filename", result]
    subprocess.run(command, check=True)
    told = json.loads((Path(os.environ["OUT"]) / result).read_text())
    assert told["completed"] == REQUESTS, told["completed"]
    assert told["total_output_tokens"] == 32 * REQUESTS, told["total_output_tokens"]
    return float(told["output_throughput"])


if __name__ == "__main__":
    main()
