"""Which kernels that were built ahead a processor gets."""

import os
from typing import get_args

import pytest

from tokenloom.engine_core.data.config import ProcessorLevel
from tokenloom.gpu_worker.kernels import levels
from tokenloom.gpu_worker.kernels.levels import LEVELS, available_levels, limit_level, native_flags, processor_features

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, []),
        ("x86_64", AVX2, ["x86-64-v3"]),
        ("x86_64", AVX2 | {"avx_vnni"}, ["x86-64-v3-vnni", "x86-64-v3"]),
        ("x86_64", AVX512 - {"avx512_vnni"}, ["x86-64-v3"]),
        ("x86_64", AVX512, ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", AVX512 | {"avx512_bf16"}, ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", AMX, ["x86-64-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", AMX - {"avx512_bf16"}, ["x86-64-v4", "x86-64-v3"]),
        ("aarch64", {"fp", "asimd"}, ["aarch64"]),
        ("riscv64", AMX, []),
    ],
)
def test_a_processor_gets_the_levels_whose_features_it_has(
    machine: str, features: set[str], expected: list[str]
) -> None:
    assert [level.name for level in available_levels(machine, features)] == expected


def test_this_machine_has_only_levels_of_its_kind() -> None:
    assert all(level.needed <= processor_features() for level in available_levels())


def test_levels_need_what_their_compiler_flags_allow() -> None:
    """A flag that its level does not ask for would make code that ends with an illegal instruction."""
    features = {
        "avx512vnni": "avx512_vnni",
        "avx512bf16": "avx512_bf16",
        "avxvnni": "avx_vnni",
        "amx-tile": "amx_tile",
        "amx-bf16": "amx_bf16",
    }
    for level in LEVELS:
        for flag in level.flags:
            if flag.startswith(("-mamx", "-mavx")):
                name = flag.removeprefix("-m")
                assert features.get(name, name.replace("-", "_")) in level.needed
        if "-march=x86-64-v4" in level.flags:
            assert level.needed >= AVX512
        if "-march=x86-64-v3" in level.flags:
            assert level.needed >= AVX2


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process on a processor with all levels of x86-64."""
    monkeypatch.setattr(levels, "_use", levels._Use())
    monkeypatch.setattr(levels, "_found_features", lambda: frozenset(AMX | {"avx_vnni"}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # so that what the process writes is removed


def test_the_setting_names_the_levels() -> None:
    assert get_args(ProcessorLevel) == ("auto", *(level.name for level in LEVELS))


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("index", range(5))
def test_a_limited_process_computes_as_a_processor_of_that_level(index: int) -> None:
    level = LEVELS[index]
    limit_level(level.name)
    assert available_levels()[0] == level
    assert processor_features() == level.needed
    assert native_flags() == level.flags
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == level.onednn
    limit_level(level.name)
    with pytest.raises(ValueError, match="already uses another level"):
        limit_level(LEVELS[index - 1].name)


@pytest.mark.usefixtures("amx")
def test_a_process_that_has_kernels_keeps_its_level() -> None:
    assert native_flags() == ("-march=native",)
    with pytest.raises(ValueError, match="x86-64-v3 cannot be set"):
        limit_level("x86-64-v3")


@pytest.mark.usefixtures("amx")
def test_a_level_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks instructions of aarch64"):
        limit_level("aarch64")
