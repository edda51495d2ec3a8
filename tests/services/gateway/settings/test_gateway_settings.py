"""Settings of a gateway and how they are checked."""

import pytest

from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings


def test_settings_from_flags() -> None:
    argv = ["--tokenizers", "unix:/a,127.0.0.1:5", "--output-processors", "unix:/b", "--coordinator", "unix:/c"]
    settings = GatewaySettings.load([*argv, "--api-key", "k", "--strict"])
    assert settings.tokenizers == ("unix:/a", "127.0.0.1:5")
    assert settings.api_key == ("k",)
    assert settings.strict


@pytest.mark.parametrize(
    "flags",
    [
        ["--coordinator", "nowhere"],
        ["--tokenizers", "nowhere"],
        ["--max-body-bytes", "0"],
        ["--api-key", ""],  # of a variable that is not set: the door stays shut
        ["--api-key", " , "],
        ["--admin-api-key", ""],
        ["--tool-call-parser", "guess"],
        ["--reasoning-parser", "guess"],
        ["--page-kills", "/control.sock", "--http-listen", "0.0.0.0:8000", "--insecure"],
        ["--page-kills", "/control.sock", "--http-listen", "host.example:8000", "--insecure"],
        ["--page-kills", "/control.sock", "--no-page"],
        ["--journal-copies", "2"],  # with one output processor
        ["--journal-copies", "3", "--output-processors", "unix:/b,unix:/c,unix:/d"],
    ],
)
def test_bad_settings(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tokenizers", "unix:/a", "--output-processors", "unix:/b", "--coordinator", "unix:/c"]
    with pytest.raises(SystemExit) as caught:
        GatewaySettings.load([*argv, *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("processors", ["unix:/b,unix:/c", "dns:///processors:7000"])
def test_copies_of_journals_need_two_output_processors(processors: str) -> None:
    """A name may stand for several."""
    argv = ["--tokenizers", "unix:/a", "--output-processors", processors, "--coordinator", "unix:/c"]
    assert GatewaySettings.load([*argv, "--journal-copies", "2"]).journal_copies == 2


def test_a_page_of_this_machine_alone_may_kill_engines() -> None:
    argv = ["--tokenizers", "unix:/a", "--output-processors", "unix:/b", "--coordinator", "unix:/c"]
    for listen in ("127.0.0.1:8000", "[::1]:8000", "localhost:8000"):
        settings = GatewaySettings.load([*argv, "--page-kills", "/control.sock", "--http-listen", listen])
        assert settings.page_kills is not None


def test_clients_may_be_silent_for_ten_seconds() -> None:
    """A plain client whose process had stood still for 6 s lost its stream to pings that ended after 1.5 s."""
    argv = ["--tokenizers", "unix:/a", "--output-processors", "unix:/b", "--coordinator", "unix:/c"]
    options = dict(GatewaySettings.load(argv).grpc_limits.options())
    assert options["grpc.http2.ping_timeout_ms"] > 10_000
    assert options["grpc.keepalive_timeout_ms"] > 10_000
