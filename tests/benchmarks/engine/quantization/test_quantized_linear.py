import math

import pytest

from tokenloom.bench.engine.quantization.quantized_linear import KINDS, SHAPES, describe, main, make_layers, run


def test_every_kind_has_its_turn() -> None:
    layers = make_layers(1)
    assert {kind: len(each) for kind, each in layers.items()} == dict.fromkeys(KINDS, len(SHAPES))
    assert all(0 < us < math.inf for us in run(layers, 2, rounds=1).values())


def test_the_share_of_the_bandwidth_is_that_of_the_weights_bytes() -> None:
    size = sum(inputs * outputs for inputs, outputs in SHAPES) * 2
    assert describe("bfloat16", size / 10e9 * 1e6, 20e9).endswith("(50%)")


def test_a_line_for_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1", "3", "--kinds", "4 bits", "--blocks", "1", "--rounds", "1"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in head
    assert [line.split(":")[0] for line in lines] == ["1 rows", "3 rows"]
