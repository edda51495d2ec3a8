"""The shapes of log probabilities, value by value."""

import math
from typing import Any

import msgspec
import pytest

from tokenloom.services.gateway.openai.openai_logprobs import (
    CompletionLogprobs,
    TokenPosition,
    chat_entry,
    positions,
    prompt_entries,
)
from tokenloom.v1.output_processor_pb2 import SlotTextLogprobs
from tokenloom.v1.types_pb2 import Logprobs

TOLD = SlotTextLogprobs(
    token_index=4,
    logprobs=Logprobs(
        sampled=[-0.5, -math.inf],
        rank=[1, 9],
        top=3,
        token_id=[10, 20, 30, 20, 10, 30],
        logprob=[-0.5, -1.5, -8, -0.25, -2.5, -math.inf],
    ),
    sampled_text=[b"a", b"\xf0\x9f"],
    token_text=[b"a", b"b", b"c", b"b", b"a", b"c"],
)
"""Two tokens, of each the two best and token 30."""


def reported() -> list[TokenPosition]:
    return list(positions([TOLD], [10, 77], 4, 2))


def entry(at: TokenPosition, *, as_ids: bool = False) -> Any:
    return msgspec.json.decode(chat_entry(at, as_ids=as_ids))


def taken(columns: CompletionLogprobs) -> Any:
    return msgspec.json.decode(b"".join(columns.take()))


def test_positions_know_ranks_and_no_infinity() -> None:
    first, second = reported()
    assert (first.token_id, first.logprob, first.rank) == (10, -0.5, 1)
    assert (second.token_id, second.logprob, second.rank) == (77, -9999.0, 9)
    assert list(first.ranks) == [1, 2, None]


def test_a_chats_content() -> None:
    first, second = map(entry, reported())
    assert first == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
            {"token": "c", "logprob": -8.0, "bytes": [99]},
        ],
    }
    assert list(first) == ["token", "logprob", "bytes", "top_logprobs"]
    assert (second["token"], second["bytes"]) == ("\ufffd", [0xF0, 0x9F])
    named = entry(reported()[1], as_ids=True)
    assert (named["token"], named["bytes"]) == ("token_id:77", [0xF0, 0x9F])
    assert [top["token"] for top in named["top_logprobs"]] == ["token_id:20", "token_id:10", "token_id:30"]


def test_an_entry_without_alternatives() -> None:
    reported = SlotTextLogprobs(logprobs=Logprobs(sampled=[-0.5], rank=[3]), sampled_text=[b'"\n'])
    (at,) = positions([reported], [10], 0, 0)
    assert entry(at) == {"token": '"\n', "logprob": -0.5, "bytes": [34, 10], "top_logprobs": []}


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_character_that_tokens_divide_stands_once_in_the_text(as_ids: bool) -> None:
    columns = CompletionLogprobs(as_ids=as_ids)
    smile = "🙂".encode()
    for data in (b"a", smile[:1], smile[1:3], smile[3:], "é".encode(), b"b"):
        columns.add(TokenPosition(5, data, -1.0, 1, (), (), (), ()))
    assert taken(columns)["text_offset"] == [0, 1, 1, 1, 2, 3]


def test_a_completions_columns_go_on_where_they_were() -> None:
    columns = CompletionLogprobs(as_ids=False)
    columns.add_first(3, b"The")
    columns.add(reported()[0])
    assert taken(columns) == {
        "text_offset": [0, 3],
        "token_logprobs": [None, -0.5],
        "tokens": ["The", "a"],
        "top_logprobs": [None, {"a": -0.5, "b": -1.5, "c": -8.0}],
    }
    assert not columns
    columns.add(reported()[1])
    assert taken(columns) == {
        "text_offset": [4],
        "token_logprobs": [-9999.0],
        "tokens": ["\ufffd"],
        "top_logprobs": [{"b": -0.25, "a": -2.5, "c": -9999.0, "\ufffd": -9999.0}],
    }
    assert taken(columns)["tokens"] == []


def test_a_prompt_as_vllm_has_it() -> None:
    first, second, third = map(msgspec.json.decode, prompt_entries(reported()))
    assert first is None
    assert second == {
        "10": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "20": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        "30": {"logprob": -8.0, "rank": None, "decoded_token": "c"},
    }
    assert third is not None
    assert third["77"] == {"logprob": -9999.0, "rank": 9, "decoded_token": "\ufffd"}
