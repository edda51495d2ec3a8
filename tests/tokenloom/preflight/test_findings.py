"""What ``tokenloom doctor`` examines."""

import datetime
from pathlib import Path

import pytest

from tokenloom.preflight import findings
from tokenloom.preflight.findings import examine_certificates, from_check
from tokenloom.preflight.small_files import CannotServe
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.state_dir import root


def test_a_check_that_refuses_fails() -> None:
    def refuse() -> None:
        raise CannotServe("full: free space")

    assert from_check("disk", "fine", refuse).text == "full: free space"
    assert from_check("disk", "fine", refuse).level == "fail"
    assert from_check("disk", "fine", lambda: None).level == "ok"


def test_this_machine_is_examined() -> None:
    found = [*findings.examine_host(root(), None), *findings.examine_engine()]
    subjects = {each.subject for each in found}
    assert {
        "platform",
        "cores",
        "GPUs",
        "memory",
        "shared memory",
        "huge pages",
        "open files",
        "sockets",
        "clock",
    } <= subjects
    assert {"packages", "images", "processor", "kernels"} <= subjects
    assert not [each for each in found if each.level == "fail"]
    assert all(each.text and "\n" not in each.text for each in found)


def test_the_gpus_of_the_driver_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings._gpus(tmp_path / "none", None).level == "ok"
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    monkeypatch.setattr(findings, "may_have_gpu", lambda: True)
    assert findings._gpus(tmp_path, None).text.startswith("2 (NVIDIA H200): each engine")
    some = findings._gpus(tmp_path, "GPU-1f,1")
    assert (some.level, "CUDA_VISIBLE_DEVICES shows GPU-1f,1: each engine" in some.text) == ("ok", True)
    monkeypatch.setattr(findings, "may_have_gpu", lambda: False)
    for hidden in ("", "-1", "none"):
        found = findings._gpus(tmp_path, hidden)
        assert (found.level, "computed on the CPU" in found.text) == ("warn", True)
    found = findings._gpus(tmp_path, None)
    assert (found.level, "CUDA" in found.text) == ("warn", True)


@pytest.mark.parametrize(
    ("content", "level"), [("MemAvailable: 999999999 kB", "ok"), ("MemAvailable: 1000 kB", "warn"), ("", "warn")]
)
def test_memory(content: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(content)
    assert findings._memory(tmp_path / "meminfo").level == level


def test_a_torchvision_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "whole_vision_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = findings._images("broken_vision")
    assert found.level == "warn"
    assert "uninstall it" in found.text
    for name in ("whole_vision_module", "no_such_module"):
        assert findings._images(name).level == "ok"


@pytest.mark.parametrize(
    ("content", "level"), [("always [madvise] never", "ok"), ("always madvise [never]", "warn"), ("", "warn")]
)
def test_huge_pages(content: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(content)
    assert findings._huge_pages(tmp_path / "enabled").level == level


def test_limits(tmp_path: Path) -> None:
    assert [findings._descriptors(limit).level for limit in (128, 1024, 20000, -1)] == ["fail", "warn", "ok", "ok"]
    assert findings._shared_memory(tmp_path / "nothing").level == "warn"


@pytest.mark.parametrize(
    ("days", "level", "word"),
    [(0, "ok", "valid until"), (25, "warn", "expires on"), (40, "fail", "expired on"), (-9, "fail", "set the clock")],
)
def test_certificates(days: int, level: str, word: str, tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    found = [each for each in examine_certificates(tmp_path, now) if "gateway.crt" in each.text]
    assert [each.level for each in found] == [level]
    assert word in found[0].text


def test_what_is_no_certificate_fails(tmp_path: Path) -> None:
    assert [each.level for each in examine_certificates(tmp_path)] == ["ok"]
    (tmp_path / "gateway.crt").write_text("nothing")
    assert [each.level for each in examine_certificates(tmp_path)] == ["fail"]


def test_kernels_without_a_compiler_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "FOLDER", tmp_path)
    assert findings._kernels().level in ("ok", "warn")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert findings._kernels().text.startswith("none built ahead and no g++: install g++")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'cannot find cc1plus' >&2\nexit 1\n")
    compiler.chmod(0o755)
    found = findings._kernels()
    assert found.level == "warn"
    assert found.text.startswith("none built ahead and g++ fails (cannot find cc1plus): install g++")
    monkeypatch.setattr(findings, "available_levels", list)
    assert findings._processor().level == "warn"
