"""``tokenloom replay``, with records that the hash worker's tokens fulfil."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from tokenloom import __version__
from tokenloom.cli.main import app
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.gpu_worker.attention.attention_backend import TOKENWISE
from tokenloom.model_files.checkpoint import tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline.replay import Replayed
from tokenloom.request.request_records import VERSION, RecordedLeg, RecordedOutput, RecordedRequest, sealed

ID = "0123456789" * 4
PROMPT = [3, 1, 4, 1, 5]
TOKENS = expected_tokens(PROMPT, 6, 2048)


def record(id: str = ID, tokens: list[int] = TOKENS, path: str = "tokenloom-demo") -> RecordedRequest:
    leg = RecordedLeg(engine="engine-0", kind="whole", numerics="hash", kv_layout="", preempted_at=[2, 3])
    return RecordedRequest(
        version=VERSION,
        id=id,
        model="tokenloom-demo",
        path=path,
        tokenizer=tokenizer_fingerprint(DEMO_MODEL).hex(),
        release=__version__,
        began_ms=0,
        ended_ms=1,
        prompt=PROMPT,
        sampling_params={"max_tokens": len(tokens), "seed": "1", "temperature": 0.0},
        outputs=[
            RecordedOutput(index=0, token_ids=tokens, finish_reason="length", numerics="hash", legs=[replace(leg)])
        ],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, *lines: bytes, day: str = "2026-01-02") -> Path:
    path = folder / f"requests-{day}-0000000000001-0000000000000001-1.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def run(*arguments: object, folder: Path | None, worker: str = "hash") -> Result:
    where = () if folder is None else ("--record-dir", str(folder))
    engine = ("--max-model-len", "256", "--num-kv-blocks", "64", "--worker", worker)
    return CliRunner().invoke(app, ["replay", *map(str, arguments), *where, *engine])


@pytest.mark.parametrize(
    "name",
    [ID, f"cmpl-{ID}", f"chatcmpl-{ID}", f"generate-tokens-{ID}", f"resp_{ID}_89abcdef", f"message_{ID}_0"],
)
def test_an_equal_request_ends_with_status_0(folder: Path, name: str) -> None:
    write(folder, sealed(record("f" * 40)), sealed(record()))
    result = run(name, folder=folder)
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, f"{ID}: equal (outputs: 1, tokens: 6)")


def test_a_request_of_several_prompts_is_found_by_the_id_of_its_answer(folder: Path) -> None:
    write(folder, *(sealed(record(f"{ID}-{number}")) for number in range(2)), sealed(record("f" * 40)))
    result = run(f"cmpl-{ID}", folder=folder)
    assert (result.exit_code, result.output.splitlines()[-2:]) == (
        0,
        [f"{ID}-{number}: equal (outputs: 1, tokens: 6)" for number in range(2)],
    )
    assert run(f"cmpl-{ID}-1", folder=folder).output.splitlines()[-1].startswith(f"{ID}-1: equal")


def test_another_token_ends_with_status_1_and_is_shown(folder: Path) -> None:
    write(folder, sealed(record(tokens=[*TOKENS[:3], 7, *TOKENS[4:]])))
    result = run(ID, folder=folder)
    assert result.exit_code == 1
    text = result.stdout
    assert f"{ID}: output 0 differs, token 3: recorded 7, replayed {TOKENS[3]}" in text
    assert "  recorded: log probabilities were not asked for" in text
    assert f"  replayed: {TOKENS[3]} " in text
    assert "  whole on engine-0 from token 0, preempted at 2, 3" in text


@pytest.mark.parametrize(
    ("numerics", "is_named"),
    [("hash", False), ("cpu/float32", False), ("cpu/bfloat16", True), (f"cpu/bfloat16/{TOKENWISE}", False)],
)
def test_the_number_of_threads_is_named_where_tokens_may_follow_it(numerics: str, is_named: bool) -> None:
    recorded = record()
    output = replace(recorded.outputs[0], numerics=numerics)
    assert Replayed(replace(recorded, outputs=[output]), []).may_follow_threads == is_named


def test_what_was_changed_is_named_and_no_success(folder: Path) -> None:
    line = sealed(record())
    path = write(folder, sealed(record("f" * 40)), line.replace(b'"index":0', b'"index":1'))
    result = run(ID, folder=folder)
    assert result.exit_code == 1
    assert f"{path.name}:2 was changed after it was written" in result.stderr


def test_all_are_replayed_or_so_many(folder: Path) -> None:
    write(
        folder,
        *(sealed(record(letter * 40)) for letter in "abc"),
        sealed(record("d" * 40, [7])),
        b"half",
        day="2026-01-03",
    )
    write(folder, sealed(record("e" * 40)), day="2026-01-01")
    result = run("--all", folder=folder)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "equal requests: 4 of 5; damaged lines: 1"
    assert "requests-2026-01-03-0000000000001-0000000000000001-1.jsonl:5 is not complete" in result.stderr
    result = run("--all", "--limit", 2, folder=folder)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        "equal requests: 2 of 2; damaged lines: 0",
    )


def test_other_versions_are_explained_before_the_verdict(folder: Path) -> None:
    write(folder, sealed(replace(record(), release="0.1")))
    lines = run(ID, folder=folder).stdout.splitlines()
    assert lines == [f"{ID}: release: recorded by 0.1, this is {__version__}", f"{ID}: equal (outputs: 1, tokens: 6)"]


def test_a_request_that_cannot_be_replayed_is_no_success(folder: Path) -> None:
    write(folder, sealed(replace(record(), left_out=["prompt embeddings"])))
    result = run(ID, folder=folder)
    assert result.exit_code == 1
    assert f"{ID}: cannot be replayed: prompt embeddings are not recorded" in result.stdout


def test_the_model_is_the_recorded_one_or_the_one_that_is_given(folder: Path) -> None:
    write(folder, sealed(record(path="/nowhere/model")))
    result = run(ID, folder=folder)
    assert result.exit_code == 1
    assert "/nowhere/model" in result.stderr
    assert run(ID, "--model", "tokenloom-demo", folder=folder).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((ID,), "no record of"),
        (("--all",), "holds no records"),
        ((), "give the id of one request, or --all"),
        ((ID, "--all"), "give the id of one request, or --all"),
        ((ID, "--limit", 3), "--limit"),
        (("--all", "--limit", 0), "--limit"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: tuple[object, ...], reason: str) -> None:
    result = run(*arguments, folder=folder)
    assert result.exit_code == (1 if "no record" in reason else 2)
    assert reason in result.stderr


def test_an_id_without_a_record_tells_of_damaged_lines(folder: Path) -> None:
    write(folder, b"x\n", sealed(record("f" * 40)))
    assert f"has no record of {ID}; it has damaged lines: 1, which --all names" in run(ID, folder=folder).stderr


def test_the_folder_is_named_or_in_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(ID, folder=None)
    assert result.exit_code == 2
    assert "--record-dir" in result.stderr
    assert "does not exist" in run(ID, folder=folder / "none").stderr or run(ID, folder=folder / "none").exit_code == 1
    monkeypatch.setenv("TOKENLOOM_REQUEST_RECORD_DIR", str(folder))
    write(folder, sealed(record()))
    assert run(ID, folder=None).exit_code == 0
