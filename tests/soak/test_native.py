import shutil

import pytest

from tests.soak.native import CASES, fuzz

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def test_schedulers_and_kernels_at_their_edges() -> None:
    assert fuzz(range(150)).keys() == CASES.keys()
