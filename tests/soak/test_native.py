import shutil
from pathlib import Path

import pytest

from tests.soak.native import CASES, fuzz, run_process

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def test_schedulers_and_kernels_at_their_edges() -> None:
    assert fuzz(range(150)).keys() == CASES.keys()


def test_steps_that_are_not_there_break_no_rule_of_the_language(tmp_path: Path) -> None:
    case = "steps that are not there"
    ended, fault = run_process(range(200), [case], tmp_path)
    assert not fault
    assert ended.keys() == {case}
