from typing import cast

import pytest

from tokenloom.services.gateway.generation.beam_run import BeamTexts, logprobs_of
from tokenloom.services.gateway.mesh.tokenizer_client import TokenizerClient
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2


class Bytes:
    """Decodes a byte for each token; 0 is special; a leading space is dropped, as SentencePiece does."""

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> tokenizer_pb2.DecodeResponse:
        text = bytes(i for i in token_ids if i or not skip_special_tokens).decode(errors="replace")
        return tokenizer_pb2.DecodeResponse(text=text.removeprefix(" "))


def submit_of(prompt: bytes, **text: bool) -> output_processor_pb2.Submit:
    return output_processor_pb2.Submit(
        prompt=types_pb2.Prompt(token_ids=prompt), text=output_processor_pb2.TextOptions(**text)
    )


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"Once upon", b" a time", " a time"),
        (b"Once upon\0", b" a\0 time", " a time"),
        ("caf\u00e9".encode()[:-1], "\u00e9!".encode()[1:], "\ufffd!"),
        (b"Once", b"", ""),
    ],
)
async def test_the_text_continues_the_prompt(prompt: bytes, output: bytes, text: str) -> None:
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    assert await texts.text_of(submit_of(prompt), list(output)) == text
    assert await texts.text_of(submit_of(prompt, detokenize=False), list(output)) == ""


async def test_special_tokens_on_request() -> None:
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    assert await texts.text_of(submit_of(b"a", skip_special_tokens=False), [98, 0]) == "b\0"


def row(*token_ids: int) -> output_processor_pb2.SlotTextLogprobs:
    values = [-float(rank) for rank in range(1, len(token_ids) + 1)]
    columns = types_pb2.Logprobs(top=len(token_ids), token_id=token_ids, logprob=values)
    texts = [bytes([token_id]) for token_id in token_ids]
    return output_processor_pb2.SlotTextLogprobs(logprobs=columns, token_text=texts)


@pytest.mark.parametrize("num_best", [0, 1, 3, 2**32 - 1])
def test_log_probabilities_of_a_sequence(num_best: int) -> None:
    joined = logprobs_of([66, 67], [row(65, 66, 68), row(67, 65, 66)], num_best)
    top = min(num_best, 3)
    assert joined.logprobs.top == top
    assert list(joined.logprobs.sampled) == [-2, -1]
    assert list(joined.logprobs.rank) == [2, 1]
    assert list(joined.sampled_text) == [b"B", b"C"]
    assert list(joined.logprobs.token_id) == [65, 66, 68][:top] + [67, 65, 66][:top]
    assert list(joined.token_text) == [b"A", b"B", b"D"][:top] + [b"C", b"A", b"B"][:top]
