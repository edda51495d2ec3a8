"""Tests that a panic of the library becomes an error of the call and does not end the process."""

from typing import Any, NoReturn

import pytest

from tokenloom.request import errors
from tokenloom.services.tokenizer import encoder as encoder_module
from tokenloom.services.tokenizer.encoder import Encoder


class Panic(BaseException):
    """As the library's PanicException: not an Exception."""


class Panicking:
    def encode(self, text: str, add_special_tokens: bool) -> NoReturn:
        raise Panic("byte index 1 is not a char boundary")


def make(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, block_size=16, max_text_bytes=100, num_threads=1)


async def test_a_panic_is_an_invalid_argument() -> None:
    encoder = make(Panicking())
    with pytest.raises(errors.InvalidArgument, match="fails on this text"):
        await encoder.encode(["x"], add_special_tokens=False, want_hashes=False, salt=b"")
    encoder.close()


async def test_more_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "MAX_WAITING", 0)
    encoder = make(Panicking())
    with pytest.raises(errors.ResourceExhausted):
        await encoder.encode(["x"], add_special_tokens=False, want_hashes=False, salt=b"")
    encoder.close()
