"""Flags of vLLM are answered with what to use instead."""

import pytest

from tokenloom.cli.serve.serve_options import OFFERS
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.runtime.host.foreign_flags import answer_unknown, foreign_flags
from tokenloom.services.runtime.host.options import flag

OWN = {flag(name) for offer in OFFERS.values() for name in offer.option.names}


def test_every_flag_has_one_answer_and_is_none_of_ours() -> None:
    names = [name for each in foreign_flags() for name in each.names]
    assert len(names) == len(set(names)) >= 100
    assert not OWN.intersection(names)


def test_answers_name_only_options_that_exist() -> None:
    for each in foreign_flags():
        assert set(each.own) <= OWN, each
        assert not each.answer.endswith("."), "it continues a sentence"


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("--prefill-context-parallel-size", "--decode-context-parallel-size"),
        ("-tp", "--tensor-parallel-size"),
        ("-tp=2", "--tensor-parallel-size"),
        ("--no-enable-log-requests", "logs each request that has ended"),
        ("--disable-log-requests", "use --no-access-log"),
        ("--trust-remote-code", "never run"),
        ("--kv-transfer-config", "--prefill and --decode"),
        ("--prot", "did you mean --port"),
    ],
)
def test_an_unknown_flag_is_answered_with_what_to_use(written: str, wanted: str) -> None:
    answer = answer_unknown(written, OWN)
    assert answer.startswith(written.partition("=")[0])
    assert wanted in answer
    assert "\n" not in answer


def test_a_service_names_the_command_whose_options_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        EngineSettings.load(["--api-server-count", "2"])
    assert exited.value.code == 2
    assert "use --gateways, with `tokenloom serve`" in capsys.readouterr().err
