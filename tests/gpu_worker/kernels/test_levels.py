"""Which kernels that were built ahead a processor gets."""

import pytest

from tokenloom.gpu_worker.kernels.levels import LEVELS, available_levels, processor_features

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, []),
        ("x86_64", AVX2, ["x86-64-v3"]),
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
