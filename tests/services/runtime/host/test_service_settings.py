"""Flags > environment > file > default."""

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from msgspec import Meta, Struct

from tokenloom.services.runtime.host.options import flag, options_of
from tokenloom.services.runtime.host.service_settings import Count, ServiceSettings


class Inner(Struct, frozen=True):
    depth: Annotated[Count | None, "Levels.", Meta(extra={"aliases": ("former_depth",)})] = None


class Settings(ServiceSettings, frozen=True, kw_only=True):
    service: ClassVar[str] = "example"

    model: Annotated[str, "What to serve."]
    peers: Annotated[tuple[str, ...], "Addresses."] = ()
    max_things: Annotated[Count, "Most things."] = 3
    inner: Inner = Inner()


class Guarded(Settings, frozen=True, kw_only=True):
    key: Annotated[Annotated[str, Meta(extra={"secret": True, "aliases": ("former_key",)})], "A key."] = ""
    key_file: Annotated[Path | None, "A file with the key."] = None
    pin: Annotated[Annotated[tuple[str, ...], Meta(extra={"secret": True})], "A key without a file."] = ()


def load(*argv: str) -> Settings:
    return Settings.load(["--model", "m", *argv])


def test_defaults() -> None:
    settings = load()
    assert (settings.instance_id, settings.listen, settings.max_things) == ("example-0", "127.0.0.1:0", 3)
    assert settings.log_format == "human"
    assert settings.drain_timeout == 30
    assert not settings.insecure


def test_flags_are_in_kebab_case() -> None:
    settings = load(
        "--max-things", "7", "--insecure", "--instance-id=e-3", "--state-file", "/s", "--log-format", "json"
    )
    assert settings.max_things == 7
    assert settings.insecure
    assert settings.instance_id == "e-3"
    assert settings.state_file == Path("/s")
    assert settings.log_format == "json"


def test_lists() -> None:
    assert load("--peers", "a,b").peers == ("a", "b")
    assert load("--peers", "a", "--peers", "b, c").peers == ("a", "b", "c")
    assert load("--peers", "").peers == ()


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('max-things = 4\ninstance_id = "file"\npeers = ["x"]\n')
    assert load("--config", str(file)).max_things == 4
    monkeypatch.setenv("TOKENLOOM_MAX_THINGS", "5")
    monkeypatch.setenv("TOKENLOOM_PEERS", "y,z")
    settings = load("--config", str(file))
    assert (settings.max_things, settings.peers, settings.instance_id) == (5, ("y", "z"), "file")
    assert load("--config", str(file), "--max-things", "6").max_things == 6
    monkeypatch.setenv("TOKENLOOM_CONFIG", str(file))
    assert load().instance_id == "file"


@pytest.mark.parametrize(("name", "text"), [("c.json", '{"max-things": 8}'), ("c.yaml", "max-things: 8")])
def test_file_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load("--config", str(tmp_path / name)).max_things == 8


@pytest.mark.parametrize(
    ("name", "data"),
    [("c.toml", b"x = ["), ("c.json", b"{"), ("c.yaml", b"a: [\n"), ("c.toml", b"\xff\xfe"), ("c.json", b"[1]")],
)
def test_a_broken_file_is_named_in_one_line(
    tmp_path: Path, name: str, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit) as caught:
        load("--config", str(tmp_path / name))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--config: {name}" in line


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Settings.load(["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    assert "python -m tokenloom.services.example" in text
    for name in options_of(Settings):
        assert flag(name) in text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "m", "--max-things", "0"], "--max-things"),
        (["--model", "m", "--max-things", "x"], "--max-things"),
        (["--model", "m", "--listen", "nowhere"], "--listen: expected host:port"),
        (["--model", "m", "--log-format", "xml"], "--log-format"),
        (["--model", "m", "--unheard-of", "1"], "--unheard-of"),
        (["--model", "m", "--drain-timeout", "nan"], "--drain-timeout"),
        ([], "--model: is required"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--config", "/dev/null"], "--config"),
    ],
)
def test_a_bad_value_prints_one_line(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Settings.load(argv)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_unknown_names_in_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("unheard_of = 1")
    with pytest.raises(SystemExit):
        load("--config", str(tmp_path / "c.toml"))
    assert "--unheard-of: no such option" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["depth = 7", "former-depth = 7", "[inner]\ndepth = 7"])
def test_options_of_a_group_stand_at_the_top_or_in_its_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    assert load("--config", str(tmp_path / "c.toml")).inner == Inner(7)


def test_a_former_name_is_accepted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--former-depth", "7").inner == Inner(7)
    monkeypatch.setenv("TOKENLOOM_FORMER_DEPTH", "8")
    assert load().inner == Inner(8)
    monkeypatch.setenv("TOKENLOOM_DEPTH", "none")
    assert load().inner == Inner(None)


def test_other_services_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_HTTP_LISTEN", "127.0.0.1:1")
    load()


def test_a_secret_among_the_flags_is_warned_of_without_showing_it() -> None:
    (warning,) = Guarded.exposed(["--model", "m", "--key", "abc123"])
    assert "--key" in warning
    assert "list of processes" in warning
    assert "TOKENLOOM_KEY, or pass --key-file, instead" in warning
    assert "abc123" not in warning
    assert len(Guarded.exposed(["--former-key=abc123", "--pin", "1"])) == 2
    assert Guarded.exposed(["--model", "--key-file", "/k"]) == []


def test_settings_do_not_show_their_secrets() -> None:
    settings = Guarded.load(["--model", "m", "--key", "abc123", "--pin", "x77,x88"])
    assert settings.key == "abc123"
    for text in (repr(settings), str(settings), f"{settings!r}"):
        assert "key=…" in text
        assert "pin=…" in text
        assert "model='m'" in text
        assert not {"abc123", "x77", "x88"} & set(text.replace("'", " ").replace(",", " ").split())
    assert "key=''" in repr(Guarded.load(["--model", "m"]))


@pytest.mark.parametrize("text", ["model: [m\nkey: abc123 : abc123\n", 'model: m\nkey: "abc123\n', "key: abc123\x00"])
def test_a_file_that_cannot_be_parsed_is_not_repeated(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        Guarded.load(["--config", str(path)])
    shown = capsys.readouterr().err
    assert "settings.yaml cannot be parsed" in shown
    assert "abc123" not in shown
