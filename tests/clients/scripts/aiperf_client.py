"""aiperf: synthetic chats, streamed; no request fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 24


def main() -> None:
    out = Path(os.environ["OUT"])
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", os.environ["TOKENLOOM_MODEL"]]
    command += ["--url", os.environ["TOKENLOOM_URL"], "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", os.environ["TOKENLOOM_CHECKPOINT"], "--isl", "64", "--osl", "32"]
    command += ["--request-count", str(REQUESTS), "--concurrency", "4", "--ui", "none", "--artifact-dir", str(out)]
    command += ["--extra-inputs", "ignore_eos:true"]
    subprocess.run(command, check=True)
    (report,) = out.rglob("profile_export_aiperf.json")
    told = json.loads(report.read_text())
    assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
    assert not told.get("error_summary"), told["error_summary"]
    print(f"{REQUESTS} chats, 4 at a time, none failed")


if __name__ == "__main__":
    main()
