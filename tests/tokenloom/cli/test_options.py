"""Options of settings structs on commands."""

from typing import Annotated, Any

import pytest
import typer
from msgspec import Meta, Struct
from typer.testing import CliRunner

from tokenloom.cli.command import Command
from tokenloom.cli.options import built, offers, parsed
from tokenloom.services.runtime.host.options import options_of


class Settings(Struct, frozen=True):
    size: Annotated[Annotated[int, Meta(ge=1)], "A size.", Meta(extra={"aliases": ("former_size",)})] = 3
    names: Annotated[tuple[str, ...], "Names."] = ()
    strict: Annotated[bool, "A switch."] = False
    key: Annotated[Annotated[str, Meta(extra={"secret": True})], "A key."] = ""
    key_file: Annotated[str, "A file with the key."] = ""


NO_KEY = {"key": None, "key_file": None}


def run(*arguments: str, **environment: str) -> tuple[int, str, list[dict[str, Any]]]:
    app, calls = typer.Typer(), list[dict[str, Any]]()

    @app.command(cls=Command)
    @offers(options_of(Settings).values(), variables=True)
    def command(own: int = 0, **chosen: Any) -> None:
        calls.append({"own": own, **chosen})

    result = CliRunner().invoke(app, list(arguments), env=environment)
    return result.exit_code, result.output, calls


def test_what_is_given_arrives_as_checked_text() -> None:
    _, _, calls = run("--own", "1", "--former-size", "7", "--names", "a, b", "--strict")
    assert calls == [{"own": 1, "size": "7", "names": "a,b", "strict": True, **NO_KEY}]
    assert built(Settings(), calls[0]) == Settings(7, ("a", "b"), True)


def test_a_list_that_is_given_twice_adds_up() -> None:
    arguments = ("--names", "a=/x, b", "--names=c", "--former-size", "7", "--size", "8")
    assert run(*arguments)[2] == [{"own": 0, "size": "8", "names": "a=/x,b,c", "strict": None, **NO_KEY}]
    assert run(TOKENLOOM_NAMES="a b,c")[2][0]["names"] == "a b,c", "a variable is not split at spaces"
    assert run("--names", "a", TOKENLOOM_NAMES="b")[2][0]["names"] == "a", "a flag replaces the variable"


def test_what_is_not_given_is_none() -> None:
    _, _, calls = run()
    assert calls == [{"own": 0, "size": None, "names": None, "strict": None, **NO_KEY}]
    assert built(Settings(size=5), calls[0]) == Settings(size=5)


def test_variables_are_read() -> None:
    assert run(TOKENLOOM_SIZE="9")[2][0]["size"] == "9"
    assert run("--size", "8", TOKENLOOM_SIZE="9")[2][0]["size"] == "8"


def test_a_secret_among_the_flags_is_warned_of() -> None:
    status, output, calls = run("--key", "abc123")
    assert (status, calls[0]["key"]) == (0, "abc123")
    assert "every user of this machine can read" in output
    assert "set TOKENLOOM_KEY, or pass --key-file, instead" in output
    assert "abc123" not in output
    status, output, calls = run(TOKENLOOM_KEY="abc123")
    assert (status, output, calls[0]["key"]) == (0, "", "abc123")


def test_a_wrong_value_is_a_usage_error() -> None:
    status, output, calls = run("--size", "0")
    assert (status, calls) == (2, [])
    assert "must be an integer ≥ 1" in " ".join(output.replace("│", " ").split())


def test_help_has_text_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "A size. [default: 3]" in run("--help")[1]


def test_engine_options_become_keywords() -> None:
    assert parsed({"max_num_seqs": "4", "dtype": None, "other": 1}) == {"max_num_seqs": 4}
