"""Encodes long texts in a process of its own: ``python -m tokenloom.services.tokenizer.encode_worker``.

A text of megabytes takes seconds and a hundred times its size, and its ids become objects of Python one after the
other. Here that stops no heartbeat, and the memory is limited. The process exchanges msgpack behind 4-byte big-endian
lengths over stdin and stdout: first ``EncodeSetup``, then one ``EncodeReply`` for each message. It ends with stdin.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_fingerprint
from tokenloom.process.process_guard import wake_with_parent
from tokenloom.request import errors
from tokenloom.v1.tokenizer_pb2 import DecodeRequest, EncodeChatRequest, EncodeChatResponse, EncodeRequest
from tokenloom.v1.types_pb2 import MediaItem

from .encoder import TextEncoder
from .render_worker import LENGTH, OUT_OF_MEMORY
from .spelled_tokens import Rendered

_NICENESS = 10
"""A text that takes seconds leaves the processors to what takes milliseconds."""

T = TypeVar("T", bound=msgspec.Struct)


class EncodeSetup(msgspec.Struct, frozen=True):
    """Says what to load; the first message."""

    path: str
    fingerprint: bytes
    """Of the tokenizer that the service has loaded."""
    block_size: int
    max_text_bytes: int
    memory_bytes: int
    """Of a text and its tokens, beyond what the process has once it is ready."""
    reads_images: bool = False
    """Whether texts may hold images."""


class EncodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries one call.

    Attributes:
        request: An ``EncodeRequest``, or the wishes of an ``EncodeChatRequest`` with ``text``, or a ``DecodeRequest``.
        text, masks: Of the rendered conversation.
        media: The images that it holds, each a ``MediaItem`` without places.
    """

    request: bytes
    text: str | None = None
    masks: dict[str, str] = {}
    media: list[bytes] = []
    decodes: bool = False


class EncodeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries the response's bytes, or why the call is refused and because of which field."""

    response: bytes = b""
    refused: str = ""
    field: str = ""


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message for the pipe."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Serve until stdin ends."""
    wake_with_parent()
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent decides
    setup = _read(sys.stdin.buffer, EncodeSetup) or sys.exit()
    path = Path(setup.path)
    if tokenizer_fingerprint(path) != setup.fingerprint:
        _write(EncodeReply(refused="the tokenizer's files were changed after the service started"))
        return
    tokenizer, images = load_tokenizer(path), None
    if setup.reads_images:
        from .media.image_reader import ImageReader  # here: most models read none

        images = ImageReader.of_checkpoint(path, tokenizer)
    encoder = TextEncoder(
        tokenizer,
        block_size=setup.block_size,
        max_text_bytes=setup.max_text_bytes,
        vector_texts=CheckpointInfo.load(path).vector_texts,
        images=images,
    )
    _limit_memory(setup.memory_bytes)
    _write(EncodeReply())
    while (job := _read(sys.stdin.buffer, EncodeJob)) is not None:
        try:
            _write(answer(encoder, job))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def answer(encoder: TextEncoder, job: EncodeJob) -> EncodeReply:
    """Return the answer to one message."""
    try:
        if job.decodes:
            return EncodeReply(encoder.decode(DecodeRequest.FromString(job.request)).SerializeToString())
        if job.text is None:
            return EncodeReply(encoder.encode(EncodeRequest.FromString(job.request)).SerializeToString())
        wishes = EncodeChatRequest.FromString(job.request)
        media = list(map(MediaItem.FromString, job.media)) if job.media else ()
        prompt = encoder.encode_chat(Rendered(job.text, job.masks), wishes, media)
        return EncodeReply(EncodeChatResponse(prompt=prompt).SerializeToString())
    except errors.InvalidArgument as error:
        return EncodeReply(refused=error.message, field=error.field or "")


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData:"))
    limit = (int(line.split()[1]) << 10) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the library aborts when it gets no more


def _read(stream: BinaryIO, message_type: type[T]) -> T | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(stream.read(*LENGTH.unpack(header)), type=message_type)


def _write(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
