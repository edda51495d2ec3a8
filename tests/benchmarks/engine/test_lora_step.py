import json

import pytest

from benchmarks.engine import lora_step


def test_the_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lora_step.main(["tokenloom-demo", "--rows", "2", "--adapters", "2", "--rank", "4", "--turns", "1", "--steps", "2"])
    report = json.loads(capsys.readouterr().out)
    for name in ("off", "unused", "adapters"):
        assert report[f"{name}_ms"] > 0
    assert report["unused_ratio"] > 0
    assert report["adapters_ratio"] > 0
