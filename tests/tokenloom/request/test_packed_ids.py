"""Token ids in one piece of bytes are those that were packed."""

from array import array

import pytest

from tokenloom.request import packed_ids
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.packed_ids import are_ids, ids_of, num_ids, pack, packed_values, response_of, unpack
from tokenloom.v1.tokenizer_pb2 import EncodeChatResponse, EncodeResponse, TokenizedPrompt
from tokenloom.v1.types_pb2 import REASONING_START_OPEN, Prompt

IDS = [0, 1, 255, 256, 2**32 - 1]


def test_packed_ids_are_read_again() -> None:
    packed, listed = TokenizedPrompt(packed_token_ids=pack(IDS)), TokenizedPrompt(token_ids=IDS)
    assert list(ids_of(packed)) == list(ids_of(listed)) == IDS
    assert list(ids_of(packed)[-2:]) == IDS[-2:]
    assert num_ids(packed) == num_ids(listed) == len(IDS)
    assert num_ids(TokenizedPrompt()) == 0


def test_a_machine_of_the_other_byte_order_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 1)
    swapped = array("I", IDS)
    swapped.byteswap()
    assert list(ids_of(TokenizedPrompt(packed_token_ids=pack(IDS)))) == list(swapped)
    assert packed_values(IDS) == swapped.tobytes()


def test_only_whole_ids_of_the_vocabulary_are_ids() -> None:
    assert are_ids(pack([1, 9]), 10)
    assert not are_ids(pack([1, 10]), 10)
    assert not are_ids(pack([1])[:3], 10)
    assert not are_ids(b"", 10)


def test_only_long_lists_of_integers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_values(IDS) is None
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 4)
    assert packed_values(IDS) == pack(IDS)
    assert packed_values(IDS[1:]) is None
    for wrong in (True, 1.0, "1", None, -1, 2**32):
        assert packed_values([*IDS, wrong]) is None
    monkeypatch.setattr(packed_ids, "MOST_IDS", 4)
    assert packed_values(IDS) is None


def test_older_receivers_get_a_list() -> None:
    for prompt in (Prompt(packed_token_ids=pack(IDS)), Prompt(token_ids=IDS)):
        unpack(prompt)
        assert (list(prompt.token_ids), prompt.packed_token_ids) == (IDS, b"")


@pytest.mark.parametrize("num_ids", [0, 1, 31, 32, 4095, 4096, 1 << 19])  # lengths take another byte at 128 and 16,384
def test_a_response_is_written_as_protobuf_writes_it(num_ids: int) -> None:
    packed = pack(range(num_ids))
    rest = TokenizedPrompt(block_hash_prefixes=[1, 2**64 - 1], reasoning_start=REASONING_START_OPEN)
    written = response_of([b"", packed[:8], packed[8:]], rest)
    rest.packed_token_ids = packed
    assert EncodeResponse.FromString(written) == EncodeResponse(prompts=[rest])
    assert EncodeChatResponse.FromString(written) == EncodeChatResponse(prompt=rest)


@pytest.mark.parametrize("prompt", [Prompt(packed_token_ids=b"12345"), Prompt(token_ids=[1], packed_token_ids=b"1234")])
def test_bytes_that_are_no_ids_are_refused(prompt: Prompt) -> None:
    with pytest.raises(InvalidArgument, match="packed_token_ids has"):
        ids_of(prompt)
