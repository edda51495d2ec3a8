"""Cases of long suites take turns in ``.ci/run``: each day runs a part of them, and after some days all have run.

``make test-long`` runs all. ``DAY=N`` gives the number of a day, which .ci/run prints, and runs the cases of that day.
"""

from collections.abc import Iterable

import pytest

DAYS = {
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
"""How many days it takes until every case of a file has run."""


def cases_of_other_days(items: Iterable[pytest.Item], day: int) -> list[pytest.Item]:
    """Return the items whose turn it is not. The cases of a file are counted by the ids of their parameters, so that
    those run together that share a fixture; a test without parameters runs each day."""
    numbers: dict[str, dict[str, int]] = {file: {} for file in DAYS}
    others = list[pytest.Item]()
    for item in items:
        file = item.nodeid.partition("::")[0]
        case = getattr(item, "callspec", None)
        if file in DAYS and case is not None:
            of_file = numbers[file]
            number = of_file.setdefault(case.id, len(of_file))
            if number % DAYS[file] != day % DAYS[file]:
                others.append(item)
    return others
