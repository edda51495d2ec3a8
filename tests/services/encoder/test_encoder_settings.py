"""What an encoder's options refuse together."""

from typing import Any

import pytest

from tokenloom.services.encoder.encoder_settings import EncoderSettings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tower_graphs": True, "device": "cpu"}, "--tower-graphs: graphs of a tower are those of a GPU"),
        ({"tower_quantization": "int4", "device": "cuda:1"}, "--tower-quantization: .* leave it out on cuda:1"),
        ({"tower_quantization": "int8-dynamic", "dtype": "float16"}, "set another --dtype"),
    ],
)
def test_a_tower_that_cannot_be_computed_so_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EncoderSettings.of(model="m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"tower_graphs": True},
        {"tower_graphs": True, "device": "cuda"},
        {"tower_quantization": "int4", "dtype": "bfloat16"},
        {"tower_quantization": "int4", "device": "cpu"},
    ],
)
def test_what_the_device_may_do_is_taken(options: dict[str, Any]) -> None:
    EncoderSettings.of(model="m", **options)
