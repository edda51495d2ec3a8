"""How an engine's options become the configuration of its core."""

from pathlib import Path

import pytest

from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.services.engine.records.engine_settings import EngineSettings, for_checkpoint


def test_the_model_that_drafts_is_found_by_name() -> None:
    config = EngineConfig(speculative=SpeculativeConfig("draft_model", model=DEMO_MODEL_NAME))
    found = for_checkpoint(config, "").speculative
    assert found == SpeculativeConfig("draft_model", model=str(DEMO_MODEL.resolve()))


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = EngineConfig(speculative=SpeculativeConfig("eagle", model=str(tmp_path)))
    with pytest.raises(ValueError, match=r"speculative_config: model .* has no config\.json"):
        for_checkpoint(config, "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngram", "model": "a"}, "the method ngram has no model"),
        ({"method": "eagle"}, "the method eagle needs the checkpoint that drafts"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min is 6 and prompt_lookup_max is 5"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings.of(speculative_config=values)


def test_flag_environment_and_file_hold_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, expected = '{"method": "ngram", "num_speculative_tokens": 4}', SpeculativeConfig("ngram", 4)
    assert EngineSettings.load(["--speculative-config", text]).engine.speculative == expected
    file = tmp_path / "engine.toml"
    file.write_text('[speculative_config]\nmethod = "ngram"\nnum_speculative_tokens = 4\n')
    assert EngineSettings.load(["--config", str(file)]).engine.speculative == expected
    monkeypatch.setenv("TOKENLOOM_SPECULATIVE_CONFIG", text)
    assert EngineSettings.load([]).engine.speculative == expected
