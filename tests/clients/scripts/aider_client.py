"""aider: a file made by an edit of a scripted model. aider offers no tools; its edits are blocks of text."""

import os
import subprocess
import sys
from pathlib import Path

OPTIONS = (
    *("--message", "Make the file made.txt.", "--edit-format", "diff", "--yes-always", "--no-git", "--no-stream"),
    *("--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable"),
    *("--no-pretty", "--map-tokens", "0"),
)


def main() -> None:
    model, url = os.environ["SCRIPTED_MODEL"], os.environ["SCRIPTED_URL"] + "/v1"
    folder = Path.cwd()
    command = [sys.executable, "-m", "aider", "--model", f"openai/{model}", *OPTIONS]
    environment = {**os.environ, "HOME": str(folder), "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none"}
    subprocess.run(command, env=environment, check=True, timeout=240, stdin=subprocess.DEVNULL)
    assert (folder / "made.txt").read_text().strip() == os.environ["SCRIPTED_WORDS"]
    print("a file made by an edit")


if __name__ == "__main__":
    main()
