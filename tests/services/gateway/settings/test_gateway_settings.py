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
    ],
)
def test_bad_settings(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tokenizers", "unix:/a", "--output-processors", "unix:/b", "--coordinator", "unix:/c"]
    with pytest.raises(SystemExit) as caught:
        GatewaySettings.load([*argv, *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err
