"""Kernels that were built ahead are found by level and digest, and need no compiler."""

import shutil
from pathlib import Path

import pytest
import torch

from tokenloom.gpu_worker.kernels import build_ahead, compiler, library, prebuilt
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable, build
from tokenloom.gpu_worker.kernels.levels import LEVELS, available_levels
from tokenloom.gpu_worker.kernels.prebuilt import find_prebuilt, library_name, variants

BEST, LOWER = LEVELS[2], LEVELS[3]


def place(folder: Path, level: prebuilt.Level, source: str = "fused", **macros: int) -> Path:
    path = folder / level.name / library_name(source, macros, level)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package whose processor has two levels."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "available_levels", lambda: [BEST, LOWER])
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KernelsUnavailable("there is no C++ compiler (g++)")

    monkeypatch.setattr(compiler, "_compiler_version", fail)


@pytest.mark.usefixtures("no_compiler")
def test_the_best_level_is_used_without_a_compiler(folder: Path) -> None:
    place(folder, LOWER)
    best = place(folder, BEST)
    assert build("fused") == best


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_lower_level_is_used(folder: Path) -> None:
    lower = place(folder, LOWER)
    assert build("fused") == lower
    with pytest.raises(KernelsUnavailable):
        build("attention", HEAD_SIZE=48)


def test_a_compiler_goes_before_a_lower_level(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(folder, LOWER)
    monkeypatch.setattr(compiler, "_build_here", lambda *_: tmp_path / "here.so")
    assert build("fused") == tmp_path / "here.so"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("given", [{"march": "x86-64-v3"}, {"cache_dir": Path("/nowhere")}])
def test_a_given_target_or_cache_is_not_built_ahead(folder: Path, given: dict[str, object]) -> None:
    place(folder, BEST)
    with pytest.raises(KernelsUnavailable):
        build("fused", **given)  # type: ignore[arg-type]


def test_a_library_of_other_sources_or_flags_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path, BEST)
    assert find_prebuilt("fused", {}, [BEST], tmp_path) is not None
    assert find_prebuilt("fused", {"HEAD_SIZE": 64}, [BEST], tmp_path) is None
    assert find_prebuilt("fused", {}, [LOWER], tmp_path) is None
    monkeypatch.setattr(prebuilt, "_contents", lambda source: "changed")
    assert find_prebuilt("fused", {}, [BEST], tmp_path) is None


def test_without_openmp_it_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libgomp.so.1: cannot open shared object file")

    place(tmp_path, BEST)
    monkeypatch.setattr(prebuilt, "expose_openmp", fail)
    assert find_prebuilt("fused", {}, [BEST], tmp_path) is None
    path = place(tmp_path, BEST, "placement")
    assert find_prebuilt("placement", {}, [BEST], tmp_path) == path, "what uses no OpenMP needs no such library"


def test_what_uses_no_openmp_is_built_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libgomp.so.1: no such file")

    monkeypatch.setattr(compiler, "expose_openmp", fail)
    assert build("placement", cache_dir=tmp_path).exists()
    with pytest.raises(KernelsUnavailable, match="no such file"):
        build("pool", cache_dir=tmp_path)


def test_every_variant_has_one_name() -> None:
    names = {library_name(*variant, level) for variant in variants() for level in LEVELS}
    assert len(names) == len(list(variants())) * len(LEVELS)


@pytest.mark.skipif(not shutil.which("g++") or not available_levels(), reason="no compiler, or no level of its own")
def test_what_is_built_ahead_loads_and_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = available_levels()[0]
    monkeypatch.setattr(build_ahead, "variants", lambda: iter([("bfloat16", {})]))
    compiler_name = build_ahead.compiler_for(level)
    assert compiler_name is not None
    stale = place(tmp_path, level, "int8")
    (path,) = build_ahead.build_ahead(level, compiler_name, tmp_path)
    assert not stale.exists()
    assert path == find_prebuilt("bfloat16", {}, [level], tmp_path)
    assert (0, 0) < build_ahead.needed_glibc(path) <= build_ahead.NEWEST_GLIBC
    assert b"libgomp" not in path.read_bytes()
    monkeypatch.setattr(library, "build", lambda *_: path)
    assert library.load_bfloat16.__wrapped__().panel_outputs() > 0
    assert torch.get_num_threads() >= 1


def test_a_compile_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_name = tmp_path / "g++"
    compiler_name.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler_name.chmod(0o755)
    monkeypatch.setattr(build_ahead, "variants", lambda: iter([("bfloat16", {})]))
    with pytest.raises(KernelsUnavailable, match="no such target"):
        build_ahead.build_ahead(LOWER, str(compiler_name), tmp_path)
    assert not list(tmp_path.rglob("*.so"))
