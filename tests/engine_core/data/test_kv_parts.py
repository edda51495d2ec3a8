"""Tests which part of a model's KV the name of a layout gives to each rank."""

import pytest

from tokenloom.engine_core.data.kv_groups import common_layout, part_suffix, read_parts

WHOLE = "HND/fp32/4x2x64/16"
PARTS = {
    "one rank": WHOLE,
    "heads": "HND/fp32/4x1x64/16@0.0.0:4x2x16+HND/fp32/4x1x64/16@0.1.0:4x2x16",
    "tokens": "HND/fp32/4x2x64/8@0.0.0:4x2x16+HND/fp32/4x2x64/8@0.0.8:4x2x16",
    "layers": "HND/fp32/3x2x64/16@0.0.0:4x2x16+HND/fp32/1x2x64/16@3.0.0:4x2x16",
    "shared heads": "+".join(f"HND/fp32/4x1x64/16@0.{head}.0:4x2x16" for head in (0, 0, 1, 1)),
}
APART = {
    "a part is absent": "HND/fp32/4x1x64/16@0.0.0:4x2x16",
    "a part is there twice, and another is absent": "+".join(["HND/fp32/4x1x64/16@0.0.0:4x2x16"] * 2),
    "parts overlap": "HND/fp32/4x2x64/8@0.0.0:4x2x16+HND/fp32/4x2x64/8@0.0.4:4x2x16",
    "a part reaches over the end": "HND/fp32/4x2x64/8@0.0.0:4x2x16+HND/fp32/4x2x64/8@0.0.9:4x2x16",
    "other numbers": "HND/fp32/4x1x64/16@0.0.0:4x2x16+HND/bf16/4x1x64/16@0.1.0:4x2x16",
    "nothing": "HND/fp32/0x2x64/16",
    "a draft model of the same shape": f"{WHOLE}+{WHOLE}",
    "a draft model behind a part": f"HND/fp32/4x2x64/8@0.0.0:4x2x16+{WHOLE}",
    "a draft model between parts": f"HND/fp32/4x2x64/8@0.0.0:4x2x16+{WHOLE}+HND/fp32/4x2x64/8@0.0.8:4x2x16",
    "compressed vectors": "latent/fp32/2x64+8/16",
    "groups of layers": f"{WHOLE}/full,9",
    "states": f"{WHOLE}/state/fp32+fp32/3x4x128+4x16x16",
    "states of a rank": f"{WHOLE}/state/fp32+fp32/3x4x128@0.0.0:4x2x16",
    "a number that is no number of layers": f"HND/fp32/{'9' * 5000}x2x64/16",
    "a name without end": "+".join([WHOLE] * 10_000),
    "": "",
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_divided_has_the_layout_of_the_whole_in_common(name: str) -> None:
    assert common_layout(PARTS[name]) == WHOLE
    assert len(read_parts(PARTS[name])) == PARTS[name].count("+") + 1


@pytest.mark.parametrize("name", APART)
def test_what_is_no_whole_has_nothing_in_common_with_others(name: str) -> None:
    assert common_layout(APART[name]) == APART[name]
    assert read_parts(APART[name]) == []


def test_a_part_is_a_box_of_layers_heads_and_tokens() -> None:
    name = "HND/int8+fp32/2x1x32/8" + part_suffix((2, 1, 8), (4, 2, 16))
    boxes = [(layer, head, token) for layer in (0, 2) for head in (0, 1) for token in (0, 8)]
    parts = read_parts("+".join("HND/int8+fp32/2x1x32/8" + part_suffix(box, (4, 2, 16)) for box in boxes))
    assert name == "HND/int8+fp32/2x1x32/8@2.1.8:4x2x16"
    assert parts[-1].box == (range(2, 4), range(1, 2), range(8, 16))
    assert (parts[-1].dtype, parts[-1].head_size, parts[-1].scale_bytes) == ("int8+fp32", 32, 4)
    assert parts[-1].layout == "HND/int8+fp32/4x2x32/16"
