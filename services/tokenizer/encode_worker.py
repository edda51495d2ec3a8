"""Encodes long texts in a process of its own: ``python -m tokenloom.services.tokenizer.encode_worker``.

A text of megabytes takes seconds and a hundred times its size, and its ids become objects of Python one after the
other. Here that stops no heartbeat, and the memory is limited. The process exchanges msgpack over its pipe: first
``EncodeSetup``, then one ``EncodeReply`` for each message.
"""

import os
from pathlib import Path
from typing import cast

import msgspec

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_fingerprint
from tokenloom.process import helper_pipe
from tokenloom.request import errors
from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import DecodeRequest, EncodeChatRequest, EncodeChatResponse, EncodeRequest
from tokenloom.v1.types_pb2 import MediaItem, ReasoningStart

from .encoder import TextEncoder
from .spelled_tokens import Rendered

_NICENESS = 10
"""A text that takes seconds leaves the processors to what takes milliseconds."""


class EncodeSetup(msgspec.Struct, frozen=True):
    """Says what to load; the first message."""

    path: str
    fingerprint: bytes
    """Of the tokenizer that the service has loaded."""
    block_size: int
    max_text_bytes: int
    memory_bytes: int
    """Of a text and its tokens, beyond what the process has once it is ready."""
    reads_media: bool = False
    """Whether texts may hold images or sounds."""


class EncodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries one call.

    Attributes:
        request: An ``EncodeRequest``, or the wishes of an ``EncodeChatRequest`` with ``text``, or a ``DecodeRequest``.
        text, masks: Of the rendered conversation.
        media: The images and sounds that it holds, each a ``MediaItem`` without places.
        reasoning_start: How the conversation leaves the model's reasoning, as ``TokenizedPrompt`` has it.
        chunks: Parts of one text, of which the packed ids are wanted and nothing else.
    """

    request: bytes = b""
    text: str | None = None
    masks: dict[str, str] = {}
    media: list[bytes] = []
    reasoning_start: int = 0
    decodes: bool = False
    chunks: list[str] = []


class EncodeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries what was made of the call, or why it is refused and because of which field.

    Attributes:
        response: As it is sent to the caller.
        num_tokens: Of all prompts in it.
        chunks: The packed ids of each part of the text.
    """

    response: bytes = b""
    num_tokens: int = 0
    chunks: list[bytes] = []
    refused: str = ""
    field: str = ""


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    os.nice(_NICENESS)
    if (first := helper_pipe.read_message()) is None:
        return
    setup = msgspec.msgpack.decode(first, type=EncodeSetup)
    path = Path(setup.path)
    if tokenizer_fingerprint(path) != setup.fingerprint:
        _answer(EncodeReply(refused="the tokenizer's files were changed after the service started"))
        return
    tokenizer, reader = load_tokenizer(path), None
    if setup.reads_media:
        from .media.media_reader import MediaReader  # here: most models read none

        reader = MediaReader.of_checkpoint(path, tokenizer)
    encoder = TextEncoder(
        tokenizer,
        block_size=setup.block_size,
        max_text_bytes=setup.max_text_bytes,
        vector_texts=CheckpointInfo.load(path).vector_texts,
        reader=reader,
    )
    helper_pipe.limit_memory(setup.memory_bytes)
    _answer(EncodeReply())
    while (message := helper_pipe.read_message()) is not None:
        try:
            _answer(answer(encoder, msgspec.msgpack.decode(message, type=EncodeJob)))
        except MemoryError:
            os._exit(helper_pipe.OUT_OF_MEMORY)


def _answer(reply: EncodeReply) -> None:
    helper_pipe.write_message(msgspec.msgpack.encode(reply))


def answer(encoder: TextEncoder, job: EncodeJob) -> EncodeReply:
    """Return the answer to one message."""
    try:
        if job.chunks:
            return EncodeReply(chunks=encoder.encode_chunks(job.chunks))
        if job.decodes:
            return EncodeReply(encoder.decode(DecodeRequest.FromString(job.request)).SerializeToString())
        if job.text is None:
            response = encoder.encode(EncodeRequest.FromString(job.request))
            return EncodeReply(response.SerializeToString(), sum(map(num_ids, response.prompts)))
        wishes = EncodeChatRequest.FromString(job.request)
        media = list(map(MediaItem.FromString, job.media)) if job.media else ()
        prompt = encoder.encode_chat(Rendered(job.text, job.masks), wishes, media)
        prompt.reasoning_start = cast(ReasoningStart, job.reasoning_start)
        return EncodeReply(EncodeChatResponse(prompt=prompt).SerializeToString(), num_ids(prompt))
    except errors.InvalidArgument as error:
        return EncodeReply(refused=error.message, field=error.field or "")


if __name__ == "__main__":
    main()
