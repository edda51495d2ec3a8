"""Each fall-back warns once, counts and is shown until it ends; the documentation has all of them."""

import logging
from pathlib import Path

import pytest

from tokenloom.process.fall_backs import KINDS, FallBack, FallBacks

ROOT = Path(__file__).parents[3]


def test_it_warns_once_counts_and_is_shown_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[int] = []
    fall_backs = FallBacks(lambda: changes.append(len(fall_backs.active)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fall_backs.begin("no_pair", "x differs from y", "engine-1")
    (record,) = caplog.records
    assert record.message == f"fall-back no_pair of engine-1: {KINDS['no_pair']} (x differs from y)"
    assert fall_backs.active == [FallBack("no_pair", "engine-1", "x differs from y")]
    assert str(fall_backs.active[0]) == "engine-1: no_pair: x differs from y"
    assert fall_backs.counts == {"no_pair": 1}
    fall_backs.end("no_pair", "engine-1")
    fall_backs.end("no_pair", "engine-1")
    assert (fall_backs.active, changes) == ([], [1, 0])
    fall_backs.begin("no_pair", "again", "engine-1")
    assert fall_backs.counts == {"no_pair": 2}


def test_further_reasons_are_kept_and_each_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fall_backs = FallBacks()
    for reason in ("no AVX2", "no g++", "no AVX2", "no g++", "x" * 500, "y"):
        fall_backs.add("slow_kernels", reason)
    assert fall_backs.own() == [("slow_kernels", f"no AVX2; no g++; {'x' * 500}")]
    assert [record.message for record in caplog.records][:2] == [
        f"fall-back slow_kernels: {KINDS['slow_kernels']} (no AVX2)",
        "fall-back slow_kernels has another reason: no g++",
    ]
    assert len(caplog.records) == 3
    assert fall_backs.counts == {"slow_kernels": 1}


def test_a_detail_that_changes_is_shown_without_another_warning(caplog: pytest.LogCaptureFixture) -> None:
    fall_backs = FallBacks()
    fall_backs.begin("kv_recomputed", "one")
    caplog.clear()
    fall_backs.begin("kv_recomputed", "two")
    assert fall_backs.own() == [("kv_recomputed", "two")]
    assert not caplog.records
    assert fall_backs.counts == {"kv_recomputed": 1}


def test_those_of_a_subject_end_together_and_others_are_shown_beside() -> None:
    beside = FallBacks()
    beside.begin("slow_kernels", "none")
    fall_backs = FallBacks(beside=beside)
    fall_backs.begin("no_pair", "x", "a")
    fall_backs.begin("unreached", "x", "a")
    fall_backs.begin("unreached", "x", "b")
    fall_backs.forget("a")
    assert [str(each) for each in fall_backs.active] == ["slow_kernels: none", "b: unreached: x"]
    assert fall_backs.counts == {"slow_kernels": 1, "no_pair": 1, "unreached": 2}


def test_only_what_the_table_has_can_begin() -> None:
    with pytest.raises(KeyError):
        FallBacks().begin("something", "else")


def test_the_page_for_operators_has_the_whole_table() -> None:
    page = (ROOT / "docs/operate/troubleshooting.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert {kind: meaning in rows.get(kind, "") for kind, meaning in KINDS.items()} == dict.fromkeys(KINDS, True)


def test_every_kind_is_used() -> None:
    folders = ("services", "engine_core", "gpu_worker", "tokenloom")
    code = "".join(
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "fall_backs.py"
    )
    assert [kind for kind in KINDS if f'"{kind}"' not in code] == []
