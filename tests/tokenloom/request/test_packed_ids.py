"""Token ids in one piece of bytes are those that were packed."""

from array import array

import pytest

from tokenloom.request.packed_ids import are_ids, ids_of, num_ids, pack
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

IDS = [0, 1, 255, 256, 2**32 - 1]


def test_packed_ids_are_read_again() -> None:
    packed, listed = TokenizedPrompt(packed_token_ids=pack(IDS)), TokenizedPrompt(token_ids=IDS)
    assert list(ids_of(packed)) == list(ids_of(listed)) == IDS
    assert list(ids_of(packed)[-2:]) == IDS[-2:]
    assert num_ids(packed) == num_ids(listed) == len(IDS)
    assert num_ids(TokenizedPrompt()) == 0


def test_a_machine_of_the_other_byte_order_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    swapped = array("I", IDS)
    swapped.byteswap()
    assert list(ids_of(TokenizedPrompt(packed_token_ids=pack(IDS)))) == list(swapped)


def test_only_whole_ids_of_the_vocabulary_are_ids() -> None:
    assert are_ids(pack([1, 9]), 10)
    assert not are_ids(pack([1, 10]), 10)
    assert not are_ids(pack([1])[:3], 10)
    assert not are_ids(b"", 10)
