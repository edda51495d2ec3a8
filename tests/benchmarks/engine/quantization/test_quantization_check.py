"""The figures of a comparison between a model and its rounded version."""

import sys

import pytest

from tokenloom.bench.engine.quantization import quantization_check
from tokenloom.bench.engine.quantization.quantization_check import Score, compare


def test_figures():
    exact = [Score(-1.0, True), Score(-2.0, False), Score(-0.5, True), Score(-3.0, False)]
    rounded = [Score(-1.5, True), Score(-2.0, True), Score(-0.25, True), Score(-3.25, False)]
    assert compare(exact, rounded) == {
        "tokens": 4,
        "mean_logprob_change": 0.25,
        "largest_logprob_change": 0.5,
        "same_top_token": 0.75,
    }


@pytest.mark.parametrize(
    ("rounding", "options", "largest_mean"),
    [
        ([], {"quantization": "int8-dynamic"}, 0.3),
        (["--kv-cache-dtype", "int8"], {"kv_cache_dtype": "int8"}, 0.02),
    ],
)
def test_the_demo_model(monkeypatch, capsys, tmp_path, rounding, options, largest_mean):
    prompts = tmp_path / "prompts"
    prompts.write_text("Once upon a time\nThe capital of France is\n")
    arguments = ["tokenloom-demo", *rounding, "--prompts", str(prompts), "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["quantization_check", *arguments])
    quantization_check.main()
    report = quantization_check.json.loads(capsys.readouterr().out)
    assert options.items() <= report.items()
    assert report["tokens"] > 0
    assert 0 < report["mean_logprob_change"] <= largest_mean
