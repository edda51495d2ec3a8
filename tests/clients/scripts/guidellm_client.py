"""guidellm: synthetic prompts at a fixed concurrency; no request fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 24


def main() -> None:
    report = Path(os.environ["OUT"]) / "report.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"]
    command += [
        "--backend",
        f"kind=openai_http,target={os.environ['TOKENLOOM_URL']},model={os.environ['TOKENLOOM_MODEL']}",
    ]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['TOKENLOOM_CHECKPOINT']}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
    command += ["--output", f"kind=json,path={report}"]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert made["errored"] == 0, made
    assert made["successful"] == REQUESTS, made
    print(f"{REQUESTS} requests, 4 at a time, none failed")


if __name__ == "__main__":
    main()
