"""Kernels are compiled once, and what goes wrong is said in one line."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch  # noqa: F401  loads the OpenMP runtime that kernels are to share

from tokenloom.gpu_worker.kernels import compiler, library
from tokenloom.gpu_worker.kernels import compiler as parallel_build
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable, build, warn_unavailable
from tokenloom.gpu_worker.kernels.library import load_attention, load_fused
from tokenloom.gpu_worker.kernels.prebuilt import openmp_in, openmp_runtime
from tokenloom.process import cache_directory
from tokenloom.process.fall_backs import OF_PROCESS

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture
def compiled(monkeypatch):
    """Names of the sources compiled so far."""
    names = []
    compile_ = compiler._compile

    def count(source, *rest):
        names.append(source.stem)
        compile_(source, *rest)

    monkeypatch.setattr(compiler, "_compile", count)
    # What they compute is not looked at, and optimising them takes most of the time.
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O0"))
    return names


@needs_compiler
def test_an_equal_library_is_built_once(tmp_path, compiled):
    first = build("batch", cache_dir=tmp_path / "cache")
    assert build("batch", cache_dir=tmp_path / "cache") == first
    assert compiled == ["batch"]
    assert list((tmp_path / "cache").iterdir()) == [first], "nothing but the library stays"


@needs_compiler
def test_what_killed_builds_have_left_is_removed(tmp_path, compiled):
    library = build("batch", cache_dir=tmp_path)
    library.unlink()
    old, young, other = (tmp_path / name for name in (f"{library.stem}-old", f"{library.stem}-new", "other-old"))
    for path in (old, young, other):
        path.mkdir()
        (path / "kernels.o").touch()
    for path in (old, other):
        os.utime(path, (time.time() - 3600,) * 2)
    assert build("batch", cache_dir=tmp_path) == library
    assert {*tmp_path.iterdir()} == {library, young, other}


@needs_compiler
def test_a_library_that_is_being_compiled_is_not_compiled_again(tmp_path, compiled):
    """Threads stand for processes: each opens the lock's file anew."""
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build("batch", cache_dir=tmp_path), range(4)))
    assert len(set(paths)) == len(compiled) == 1
    assert list(tmp_path.iterdir()) == paths[:1]


@needs_compiler
def test_kernels_are_compiled_side_by_side_while_the_body_runs(tmp_path, compiled, monkeypatch):
    meeting = threading.Barrier(2, timeout=60)
    run = compiler._run

    def meet(*command):
        if "-c" in command:
            meeting.wait()  # one after the other would never meet
        return run(*command)

    monkeypatch.setattr(compiler, "_run", meet)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def cached(source, march="native", cache_dir=None, **macros):
        return build(source, march, tmp_path, **macros)

    monkeypatch.setattr(parallel_build, "build", cached)
    with parallel_build.parallel_build([("pool", {}), ("batch", {})]):
        assert cached("pool").exists(), "the body waits for a kernel that is being compiled"
    assert sorted(compiled) == ["batch", "pool"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_kernel_that_cannot_be_compiled_is_the_layers_to_report(monkeypatch):
    def fail(source, march, cache_dir, **macros):
        raise KernelsUnavailable("there is no C++ compiler (g++)")

    monkeypatch.setattr(parallel_build, "build", fail)
    with parallel_build.parallel_build([("pool", {})]):
        pass


@needs_compiler
def test_another_processor_or_target_is_another_library(tmp_path, compiled, monkeypatch):
    paths = {build("batch", cache_dir=tmp_path), build("batch", march="x86-64-v2", cache_dir=tmp_path)}
    monkeypatch.setattr(compiler, "_cpu", lambda: "flags : sse2")
    paths.add(build("batch", cache_dir=tmp_path))
    assert len(paths) == len(compiled) == 3


@needs_compiler
def test_without_a_writable_cache_the_process_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    path = build("batch", cache_dir=tmp_path)
    assert path.exists()
    assert tmp_path not in path.parents
    assert path == build("batch", cache_dir=tmp_path)


@needs_compiler
def test_a_failed_build_says_why(tmp_path):
    with pytest.raises(KernelsUnavailable, match=r"g\+\+ failed: .*march"):
        build("batch", march="psychic", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_compiler(monkeypatch):
    def run(*_args, **_options):
        raise FileNotFoundError("g++")

    monkeypatch.setattr(subprocess, "run", run)
    compiler._compiler_version.cache_clear()
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build("batch")
    compiler._compiler_version.cache_clear()


@pytest.mark.parametrize("folder", ["/home/my models/.venv/lib", "/tmp/a  b'\u00fc%c/libgomp", "/tmp/\udcff"])
def test_the_openmp_library_is_found_in_a_folder_of_any_name(folder: str) -> None:
    row = "7f00-7f01 r-xp 00000000 08:01 7340 {}\n"
    maps = row.format("/tmp/libgomp/other.so") + row.format(f"{folder}/libgomp.so.1")
    maps += "7f02-7f03 rw-p 00000000 00:00 0 \n"
    assert openmp_in(maps) == Path(f"{folder}/libgomp.so.1")
    assert openmp_in("7f02-7f03 rw-p 00000000 00:00 0 \n") is None


@needs_compiler
def test_a_library_of_the_cache_depends_on_no_path_of_this_environment(tmp_path: Path, compiled: list[str]) -> None:
    """Otherwise what one environment has built would hide that another cannot build it."""
    runtime = openmp_runtime()
    assert runtime is not None
    content = build("lora", cache_dir=tmp_path).read_bytes()
    assert b"GOMP_parallel" in content
    assert runtime.name.encode() not in content
    assert b"libgomp" not in content
    assert compiled == ["lora"]


@pytest.mark.parametrize(("given", "found"), [("/x/y", "/x/y"), ("", "/h/.cache"), ("relative", "/h/.cache")])
def test_the_cache_follows_the_user_s_variable(given: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_directory() == Path(found, "tokenloom")


def test_kernels_are_kept_there(tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "find_prebuilt", lambda *_: None)
    assert build("batch").parent == tmp_path / "tokenloom" / "kernels"


@pytest.mark.parametrize("load", [library.load_bfloat16_dots, library.load_batch, library.load_floats])
def test_a_kernel_that_cannot_be_built_is_a_fall_back(
    load: Callable[[], CDLL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one for which a layer, or numpy, stands in without a word."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "find_prebuilt", lambda *_: None)
    monkeypatch.setattr(compiler, "FLAGS", ("-fno-such-flag",))
    for _ in range(2):
        with pytest.raises(KernelsUnavailable, match="no-such-flag"):
            load.__wrapped__()  # type: ignore[attr-defined]
    ((kind, detail),) = OF_PROCESS.own()
    assert kind == "slow_kernels"
    assert detail.count("no-such-flag") == 1


def test_reasons_are_kept_beside_each_other_and_bounded() -> None:
    for reason in ("no AVX2", "no g++", "no AVX2", *(f"{each} " * 100 for each in range(9))):
        warn_unavailable(reason)
    ((_, detail),) = OF_PROCESS.own()
    assert detail.startswith("no AVX2; no g++; 0 0")
    assert len(detail) < 1000


def test_kernels_and_torch_share_one_openmp_runtime():
    load_attention(32)
    load_fused()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    assert len({path for path in mapped if "libgomp" in path or "libomp" in path or "libiomp" in path}) == 1


@needs_compiler
def test_a_full_disk_leaves_no_kernels_and_says_so(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_compile", fail)
    with pytest.raises(KernelsUnavailable, match=r"the kernels of batch cannot be built: .*No space left on device"):
        build("batch", cache_dir=tmp_path)
