"""Tests take turns in ``.ci/run``: each run takes a part of them; `make test` and `make test-long` take all.

Long files take turns, and in the longest ones cases too. Of the tests that compute, each run takes some cases of each.
``TURN=N`` gives a number, which .ci/run takes from the clock and prints.
"""

from collections.abc import Iterable
from zlib import crc32

import pytest

FILES = 4
"""In how many parts the files of ``FOLDERS`` take turns."""
FOLDERS = (
    "tests/chaos/",
    "tests/e2e/",
    "tests/gpu_check/",
    "tests/mesh/",
    "tests/parity/",
    "tests/simulation/",
    "tests/soak/",
    "tests/tokenloom/offline/",
)
ALWAYS = (
    "tests/e2e/test_demo.py",
    "tests/e2e/test_kill.py",
    "tests/e2e/test_serve.py",
    "tests/mesh/answers/test_answers.py",
    "tests/mesh/faults/test_faults.py",
    "tests/mesh/test_disaggregation.py",
    "tests/parity/test_greedy.py",
)
"""Files of these folders that every run takes: what a user meets first, and the ways to fail."""
CASES = {
    "tests/e2e/test_console_blocks.py": 5,
    "tests/e2e/test_more_models.py": 3,
    "tests/parity/test_backends.py": 3,
    "tests/parity/test_batch_invariant.py": 3,
    "tests/parity/test_continuations.py": 3,
    "tests/parity/test_entries.py": 4,
    "tests/parity/test_exact_states.py": 4,
    "tests/parity/test_greedy.py": 3,
    "tests/parity/test_images.py": 3,
    "tests/parity/test_logprobs.py": 3,
    "tests/parity/test_lora_layouts.py": 3,
    "tests/parity/test_offline_requests.py": 2,
    "tests/parity/test_released.py": 3,
    "tests/parity/test_states.py": 4,
    "tests/parity/test_text_of_vision.py": 3,
    "tests/soak/models/test_models_table.py": 8,
}
"""In how many parts the cases of a file take turns."""
OF_EACH_TEST = {
    "tests/engine_core/data_parallel/": 3,
    "tests/engine_core/executor/": 3,
    "tests/engine_core/structured_output/": 3,
    "tests/examples/test_policy_gradient.py": 3,
    "tests/explorer/": 3,
    "tests/gpu_worker/": 3,
    "tests/services/gateway/formats/": 3,
    "tests/services/gateway/openai/test_transcription_parity.py": 3,
    "tests/simulation/": 3,
    "tests/tokenloom/cli/test_command_lines.py": 3,
    "tests/tokenloom/offline/": 3,
}
"""In how many parts the cases of the tests of a folder or file take turns. Tests without cases always run, except those
of ``FOLDERS``."""


def of_other_turns(items: Iterable[pytest.Item], turn: int) -> list[pytest.Item]:
    """Return the items that this turn leaves out.

    The cases of a file are counted by the ids of their parameters, so that those run together that share a fixture; a
    test without parameters runs whenever its file does."""
    numbers: dict[str, dict[str, int]] = {file: {} for file in CASES}
    others = list[pytest.Item]()
    for item in items:
        file = item.nodeid.partition("::")[0]
        case = getattr(item, "callspec", None)
        if file in CASES and case is not None:
            of_file = numbers[file]
            number = of_file.setdefault(case.id, len(of_file))
            is_left_out = number % CASES[file] != turn % CASES[file]
        elif case is not None and (parts := _parts_of_each_test(file)):
            # By the name: of a product of parameters the numbers would select one value of the last of them.
            is_left_out = (crc32(case.id.encode()) + turn) % parts != 0
        else:
            # By the name, so that a new file moves no other one to another turn.
            is_left_out = file.startswith(FOLDERS) and file not in ALWAYS and (crc32(file.encode()) + turn) % FILES != 0
        if is_left_out:
            others.append(item)
    return others


def _parts_of_each_test(file: str) -> int:
    return next((parts for folder, parts in OF_EACH_TEST.items() if file.startswith(folder)), 0)
