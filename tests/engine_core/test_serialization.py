import msgspec
import pytest

from tokenloom.engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from tokenloom.engine_core.sampling_params import SamplingParams
from tokenloom.engine_core.serialization import Decoder, call_with_raw, encode, from_raw, to_raw


def test_messages_survive_the_round_trip() -> None:
    request = EngineCoreRequest("a", [1, 2], SamplingParams(max_tokens=3, seed=2**64 - 1), cache_salt=b"\x00salt")
    assert Decoder(EngineCoreRequest).decode(encode(request)) == request
    outputs = EngineCoreOutputs(step=7, outputs=[EngineCoreOutput("a", [5], 2, FinishReason.STOP, stop_token_id=5)])
    assert Decoder(EngineCoreOutputs).decode(encode(outputs)) == outputs


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], encode({"step": 1}), encode("text"), [*encode([1]), b"more"], []])
def test_what_is_not_the_expected_type_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(msgspec.DecodeError):
        Decoder(EngineCoreOutputs).decode(frames)


def double(value: int, *, scale: int = 2) -> int:
    return value * scale


def test_arguments_are_decoded_to_the_annotated_types() -> None:
    assert call_with_raw(double, [to_raw(4)]) == 8
    with pytest.raises(msgspec.ValidationError):
        call_with_raw(double, [to_raw("4")])
    with pytest.raises(TypeError):
        call_with_raw(double, [])


def test_raw_values_keep_plain_data() -> None:
    assert from_raw(to_raw({"a": [1, None, b"x", True]})) == {"a": [1, None, b"x", True]}
