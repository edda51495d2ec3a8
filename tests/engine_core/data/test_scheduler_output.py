import numpy as np

from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.engine_core.wire.frames import Decoder, encode


def test_a_bitmask_crosses_a_socket() -> None:
    bitmask = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5), dtype=np.int32)
    frames = [bytes(frame) for frame in encode(GrammarOutput(["a", "b", "c"], bitmask))]
    received = Decoder[GrammarOutput](GrammarOutput).decode(frames)
    assert received.req_ids == ["a", "b", "c"]
    np.testing.assert_array_equal(received.bitmask, bitmask)


def test_bit_i_of_word_w_is_token_32_w_plus_i() -> None:
    bitmask = np.array([[1, 0, 2], [0, -1, 0]], dtype=np.int32)
    allowed = GrammarOutput(["a", "b"], bitmask).allowed(70)
    assert allowed.shape == (2, 70)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[0, 65], list(range(32, 64))]
