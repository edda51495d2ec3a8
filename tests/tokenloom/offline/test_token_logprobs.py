import struct

import pytest

from tokenloom import Logprob
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline.offline_request import token_logprobs
from tokenloom.services.output_processor.text.vocabulary import Vocabulary

COLUMNS = Logprobs([-2.0, -0.125], [5, 1], 3, [8, 9, 4, 6, 8, 4], [-0.5, -1.0, -7.0, -0.125, -0.25, -9.0])


def test_the_token_itself_first_then_the_best_then_those_asked_for():
    first, second = token_logprobs(COLUMNS, [7, 6], 1, None)
    assert list(first.items()) == [
        (7, Logprob(-2.0, 5)),
        (8, Logprob(-0.5, 1)),
        (9, Logprob(-1.0, 2)),
        (4, Logprob(-7.0, None)),
    ]
    assert list(second) == [6, 8, 4]
    assert second[6] == Logprob(-0.125, 1)


@pytest.mark.parametrize("token_ids", [[], [7]])
def test_only_of_the_tokens_that_remain(token_ids):
    assert len(token_logprobs(COLUMNS, token_ids, 1, None)) == len(token_ids)


def test_decoded():
    tokenizer = load_tokenizer(DEMO_MODEL)
    (once,) = tokenizer.encode("Once").ids[:1]
    (decoded,) = token_logprobs(Logprobs([-1.0], [1]), [once], 0, Vocabulary(tokenizer))
    assert decoded[once].decoded_token == tokenizer.decode([once])


def test_the_numbers_are_those_of_the_services():
    """The services send floats of 32 bits, so that `LLM` and HTTP give the same number."""
    (only,) = token_logprobs(Logprobs([-0.1], [1]), [7], 0, None)
    assert only[7].logprob == struct.unpack("<f", struct.pack("<f", -0.1))[0]
