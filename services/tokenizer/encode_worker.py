"""Encodes long texts in a process of its own: ``python -m tokenloom.services.tokenizer.encode_worker``.

A text of megabytes takes seconds and a hundred times its size, and its ids become objects of Python one after the
other. Here that stops no heartbeat, and the memory is limited. So it is with the trials that show where texts may be
cut. The process exchanges msgpack over its pipe: first ``EncodeSetup``, then one ``EncodeReply`` for each message.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Final, cast

import msgspec
from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_fingerprint
from tokenloom.process import helper_pipe
from tokenloom.process.process_guard import yield_processors
from tokenloom.request import errors, packed_ids
from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import DecodeRequest, EncodeChatRequest, EncodeChatResponse, EncodeRequest
from tokenloom.v1.types_pb2 import MediaItem, ReasoningStart

from .encoder import CUT_KINDS, CutKind, SafeCuts, TextEncoder, contained
from .spelled_tokens import Rendered


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
    """Whether texts may hold images, videos or sounds."""


class EncodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries one call.

    Attributes:
        request: An ``EncodeRequest``, or the wishes of an ``EncodeChatRequest`` with ``text``, or a ``DecodeRequest``.
        text, masks: Of the rendered conversation.
        media: The images, videos and sounds that it holds, each a ``MediaItem`` without places.
        reasoning_start: How the conversation leaves the model's reasoning, as ``TokenizedPrompt`` has it.
        chunks: Parts of one text, of which the packed ids are wanted and nothing else.
        tries_cuts: Whether it is to be tried where texts may be cut; nothing else is wanted then.
    """

    request: bytes = b""
    text: str | None = None
    masks: dict[str, str] = {}
    media: list[bytes] = []
    reasoning_start: int = 0
    decodes: bool = False
    chunks: list[str] = []
    tries_cuts: bool = False


class EncodeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries what was made of the call, or why it is refused and because of which field.

    Attributes:
        response: As it is sent to the caller.
        num_tokens: Of all prompts in it.
        chunks: The packed ids of each part of the text.
        cut_kinds: The names of the kinds of places where texts may be cut.
        around: The special tokens that stand before and behind a text, packed; empty: texts are not cut.
    """

    response: bytes = b""
    num_tokens: int = 0
    chunks: list[bytes] = []
    cut_kinds: list[str] = []
    around: list[bytes] = []
    refused: str = ""
    field: str = ""


_AWKWARD: Final = (
    *" \n\t\r\u00a0\u200b\u3000'\",./_<|{=aB1éßİΩς你½²ﬁ😀\u0301\u200d\u2019\ufffd\x00",
    *("  ", "\n\n", "\r\n", "'s", "...", "12", "123456"),
    *("e\u0301", "日本語", "한국", "हिन्दी", "ไทย", "👩\u200d👩", "🇩🇪"),
)
_SPELLED = str.maketrans("ĠĊĉč▁", " \n\t\r ")
"""How vocabularies spell blanks."""
NUM_TEXTS = 10_000
"""Texts on which each kind of cut is tried."""
_TEXTS_AT_ONCE = 200


class CutTrials:
    """Tries on texts where those of one tokenizer may be cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        around = tokenizer.encode("a")
        is_text = [not is_special for is_special in around.special_tokens_mask]
        num_before, num_after = (mask.index(True) if any(mask) else 0 for mask in (is_text, is_text[::-1]))
        self._prefix, self._suffix = around.ids[:num_before], around.ids[len(around.ids) - num_after :]
        self._vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=False))
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = [token.content for token in added]
        self._stripping = [token.content for token in added if token.lstrip or token.rstrip]
        """Take the blanks beside them. Among thousands of tokens chance would not choose each of these few."""
        spelled = [token.translate(_SPELLED) for token in self._vocabulary]
        some = Random(0).sample(spelled, min(len(spelled), 4000))
        blanks = [token for token in spelled if token.isspace()]
        self._pieces = [each for each in (_AWKWARD, self._added, blanks, some, some) if each]
        """Of what texts are made."""

    def find(self, num_texts: int) -> SafeCuts | None:
        """Return how texts may be cut; None: no kind of cut is safe. ``num_texts``: on how many each kind is tried;
        10,000 take about half a second."""
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            return None
        kinds = [kind for kind in CUT_KINDS if self._is_safe(kind, num_texts)]
        return SafeCuts(kinds, packed_ids.pack(self._prefix), packed_ids.pack(self._suffix)) if kinds else None

    def _is_safe(self, kind: CutKind, num_texts: int) -> bool:
        """Return whether the ids of a text are those of both sides of such a cut, for every text that is tried."""
        is_crossing, is_cut = re.compile(kind.crossing).search, re.compile(kind.pattern).search
        if any(map(is_crossing, self._vocabulary)) or any(map(is_cut, self._added)):
            return False
        texts = chain(_texts_with(self._stripping, kind), islice(_texts(kind, self._pieces), num_texts))
        encode, adds = self._tokenizer.encode_batch_fast, True
        while pairs := list(islice(texts, _TEXTS_AT_ONCE)):
            adds = not adds  # special tokens around every second batch
            prefix, suffix = (self._prefix, self._suffix) if adds else ([], [])
            wholes = encode([one + other for one, other in pairs], add_special_tokens=adds)
            sides = [encode(list(side), add_special_tokens=False) for side in zip(*pairs, strict=True)]
            for whole, one, other in zip(wholes, *sides, strict=True):
                if whole.ids != [*prefix, *one.ids, *other.ids, *suffix]:
                    return False
        return True


def _texts_with(tokens: Sequence[str], kind: CutKind) -> Iterator[tuple[str, str]]:
    """Yield texts with each token on either side of a cut, if it may stand there."""
    for token in tokens:
        pairs = chain(((token, after) for after in kind.afters), ((before, token) for before in kind.befores))
        yield from (pair for pair in pairs if kind.is_between(*pair))


def _texts(kind: CutKind, pieces: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield texts, each as both sides of a cut."""
    random, is_between = Random(kind.name), kind.is_between
    ends = [each for of_kind in pieces for each in of_kind if is_between(each, kind.afters[0])] or kind.befores
    starts = [each for of_kind in pieces for each in of_kind if is_between(kind.befores[0], each)] or kind.afters
    while True:
        before = [random.choice(random.choice(pieces)) for _ in range(random.randrange(5))]
        after = [random.choice(random.choice(pieces)) for _ in range(random.randrange(5))]
        before.append(random.choice(random.choice((kind.befores, ends))))
        one, other = "".join(before), "".join([random.choice(random.choice((kind.afters, starts))), *after])
        if is_between(one, other):
            yield one, other


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    yield_processors()
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
        if job.tries_cuts:
            return _try_cuts(encoder.tokenizer)
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


def _try_cuts(tokenizer: Tokenizer) -> EncodeReply:
    try:
        cuts = CutTrials(tokenizer).find(NUM_TEXTS)
    except BaseException as error:  # the library panics on some texts
        raise contained(error) from error
    if cuts is None:
        return EncodeReply()
    return EncodeReply(cut_kinds=[kind.name for kind in cuts.kinds], around=[cuts.prefix, cuts.suffix])


if __name__ == "__main__":
    main()
