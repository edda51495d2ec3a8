"""Libraries of kernels are loaded once, and so is the reason why one cannot be."""

from ctypes import CDLL

import pytest

from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.library import load_once


def test_a_library_and_a_failure_are_remembered() -> None:
    tried, library = list[str](), CDLL(None)

    @load_once
    def load(march: str = "native") -> CDLL:
        tried.append(march)
        if march == "native":
            raise KernelsUnavailable("the CPU has no AVX-512")
        return library

    for _ in range(3):
        with pytest.raises(KernelsUnavailable, match=r"^the CPU has no AVX-512$"):
            load()
        assert load("haswell") is library
    assert tried == ["native", "haswell"]
