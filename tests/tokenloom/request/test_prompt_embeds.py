import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.prompt_embeds import check_embeds, join_parts, read_safetensors
from tokenloom.v1.types_pb2 import ModelLimits, Prompt, PromptEmbeds, SamplingParams

HIDDEN = 4
LIMITS = ModelLimits(max_model_len=20, vocab_size=100, hidden_size=HIDDEN)
ROWS = np.arange(12, dtype=np.float32).reshape(3, HIDDEN) / 8


def safetensors(dtype: str = "F32", shape: object = (3, HIDDEN), body: bytes = ROWS.tobytes(), **more: object) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(body)]} | more
    header = json.dumps({"__metadata__": {"format": "pt"}, "prompt_embeds": entry}).encode()
    return struct.pack("<Q", len(header)) + header + body


@pytest.mark.parametrize(
    ("dtype", "body"),
    [
        ("F32", ROWS.tobytes()),
        ("F16", ROWS.astype("<f2").tobytes()),
        ("BF16", (ROWS.view("<u4") >> 16).astype("<u2").tobytes()),
    ],
)
def test_every_dtype_becomes_float32(dtype: str, body: bytes) -> None:
    rows = read_safetensors(safetensors(dtype, body=body), HIDDEN, 10)
    np.testing.assert_array_equal(np.frombuffer(rows, "<f4").reshape(3, HIDDEN), ROWS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04 a zip", "torch.save"),
        (struct.pack("<Q", 2**40) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{}", "one tensor"),
        (struct.pack("<Q", 2) + b"[]", "one tensor"),
        (safetensors("I32"), "dtype 'I32'"),
        (safetensors(shape=[3, 5], body=bytes(60)), r"shape \[3, 5\], expected \[n >= 1, 4\]"),
        (safetensors(shape=[12]), r"shape \[12\]"),
        (safetensors(shape=[0, HIDDEN], body=b""), r"shape \[0, 4\]"),
        (safetensors(shape=[2**62, HIDDEN]), "bytes for shape"),
        (safetensors(shape=[-3, -HIDDEN]), "not a safetensors file"),
        (safetensors(shape="34"), "not a safetensors file"),
        (safetensors(data_offsets=[8, 48]), "bytes for shape"),
        (safetensors(shape=[11, HIDDEN], body=bytes(11 * 16)), "room for 10"),
    ],
)
def test_anything_else_is_refused_before_it_is_read(data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_safetensors(data, HIDDEN, 10)


@given(st.binary(max_size=64), st.integers(0, 8))
def test_noise_is_refused(noise: bytes, cut: int) -> None:
    with pytest.raises(InvalidArgument):
        read_safetensors(struct.pack("<Q", len(noise) - cut if cut < len(noise) else 0) + noise, HIDDEN, 10)


def test_parts_are_joined_in_order() -> None:
    prompt = join_parts([[7, 8], safetensors(), [9]], LIMITS)
    assert list(prompt.token_ids) == [7, 8, 0, 0, 0, 9]
    assert list(prompt.embeds) == [PromptEmbeds(position=2, num_tokens=3, rows=ROWS.tobytes())]
    check_embeds(prompt, SamplingParams(), LIMITS)


def test_parts_may_not_outgrow_the_context() -> None:
    with pytest.raises(InvalidArgument, match="room for 1"):
        join_parts([[1] * 18, safetensors()], LIMITS)


def test_without_an_engine_that_takes_them_they_are_refused_by_name() -> None:
    limits = ModelLimits(max_model_len=20, vocab_size=100)
    with pytest.raises(InvalidArgument, match="--enable-prompt-embeds"):
        join_parts([safetensors()], limits)
    with pytest.raises(InvalidArgument, match="--enable-prompt-embeds"):
        check_embeds(join_parts([safetensors()], LIMITS), SamplingParams(), limits)


def span(position: int, num_tokens: int, rows: np.ndarray | None = None) -> PromptEmbeds:
    rows = np.ones((num_tokens, HIDDEN), dtype=np.float32) if rows is None else rows
    return PromptEmbeds(position=position, num_tokens=num_tokens, rows=rows.tobytes())


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([span(8, 3)], "outside the prompt"),
        ([span(2, 0)], "empty"),
        ([span(2, 3), span(4, 1)], "overlap"),
        ([span(4, 1), span(2, 1)], "overlap"),
        ([span(0, 3, np.ones((3, 5), dtype=np.float32))], "60 bytes for 3 rows"),
        ([span(0, 1, np.array([1, 2, np.nan, 4], dtype=np.float32))], "NaN or infinities"),
        ([span(0, 1, np.array([1, 2, -np.inf, 4], dtype=np.float32))], "NaN or infinities"),
    ],
)
def test_what_the_wire_says_is_checked(spans: list[PromptEmbeds], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        check_embeds(Prompt(token_ids=[0] * 10, embeds=spans), SamplingParams(), LIMITS)


def test_prompt_logprobs_of_rows_have_no_meaning() -> None:
    with pytest.raises(InvalidArgument, match="prompt_logprobs"):
        check_embeds(join_parts([safetensors()], LIMITS), SamplingParams(prompt_logprobs=1), LIMITS)
