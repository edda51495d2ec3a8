"""From an installation to the first sentence: ``tokenloom run`` downloads a model, serves it and answers.

The hub is a mirror on this machine (``HF_ENDPOINT``), which gives the demo model's files under the name of a listed
model. ``python -m tests.wheel.first_sentence`` measures this environment, with the kernels that it has; `make
wheel-check` measures the wheel, with nothing in its home folder. The processor time is that of all processes until the
answer is there.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from tests.hub_mirror import HubMirror
from tests.wheel.family import cpu_seconds
from tokenloom.cli.serve.run import MODELS
from tokenloom.model_files.model_path import DEMO_MODEL

NAME = "phi3-mini"
"""One without flags, which are for contexts longer than the demo model's."""
MOST_SECONDS = 12.0
QUESTION, ANSWER = "What is 3 plus 4?", "3 + 4 = 7."


def first_sentence(command: tuple[str, ...], variables: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds of processor time and of wall time until the answer.

    Args:
        command: Runs ``tokenloom``.
        variables: Its environment.
    """
    with tempfile.TemporaryDirectory(prefix="tl-first-", dir="/tmp") as folder, _mirror().serve() as mirror:
        given = {**variables, "HF_HOME": f"{folder}/hub", "HF_ENDPOINT": mirror.url, "XDG_RUNTIME_DIR": folder}
        given.pop("HF_HUB_OFFLINE", None)
        started = time.monotonic()
        with open(f"{folder}/said", "w+") as said:
            process = subprocess.Popen(
                [*command, "run", NAME, QUESTION, "--temperature", "0"],
                env=given,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            with process:
                assert process.stdout is not None
                line = process.stdout.readline()
                wall, cpu = time.monotonic() - started, cpu_seconds(process.pid)
            said.seek(0)
            assert line.strip() == ANSWER, f"{line}{said.read()}"
        assert process.returncode == 0
        assert mirror.downloads["model.safetensors"] == 1
    return cpu, wall


def _mirror() -> HubMirror:
    return HubMirror(DEMO_MODEL, name=MODELS[NAME].model)


def main() -> int:
    command = (sys.executable, "-P", "-m", "tokenloom.cli.main")
    cpu, wall = first_sentence(command, os.environ)
    print(f"{cpu:.1f} s of CPU, {wall:.1f} s of wall time, at most {MOST_SECONDS:g} s of CPU: {NAME} says {ANSWER!r}")
    return 0 if cpu <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
