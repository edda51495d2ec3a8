"""Runs the tokenizer as a service: loads a checkpoint's tokenizer and chat template."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import IMAGE_FILES, CheckpointInfo, load_tokenizer, tokenizer_fingerprint
from tokenloom.model_files.model_path import resolve, served_name
from tokenloom.request.chat_template import read_chat_template
from tokenloom.request.reasoning import format_of_template
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.tokenizer_pb2 import GetTokenizerInfoResponse
from tokenloom.v1.types_pb2 import Fingerprint

from . import output_format
from .encode_worker import EncodeSetup
from .encoder import TextEncoder
from .long_texts import EncodeProcesses, LongTexts
from .renderer import Renderer
from .tokenizer_servicer import TokenizerMetrics, TokenizerServicer, add_servicer
from .tokenizer_settings import TokenizerSettings

if TYPE_CHECKING:
    from .media.media_reader import MediaReader
    from .media.transcript_prompts import TranscriptPrompts

ENCODE_MEMORY_BYTES = 2 << 30
"""Limits what a process takes for one call: 8 MB of one letter take 1.3 GB."""


class TokenizerService:
    """Serves ``Tokenizer``."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._servicer: TokenizerServicer | None = None
        self._processes: EncodeProcesses | None = None
        self._renderer: Renderer | None = None

    async def start(self, host: Host) -> None:
        settings = self._settings
        info, tokenizer, answer = await asyncio.to_thread(_load, settings)
        size, most, texts = settings.block_size, settings.max_text_bytes, info.vector_texts
        path = resolve(settings.model, weights=False)
        reader = await asyncio.to_thread(_reader, path, tokenizer)
        if reader is not None:
            answer.media_kinds.extend(reader.kinds)
        transcripts = await asyncio.to_thread(_transcripts, path, tokenizer)
        if transcripts is not None:
            answer.transcript.CopyFrom(transcripts.traits)
        encoder = TextEncoder(tokenizer, block_size=size, max_text_bytes=most, vector_texts=texts, reader=reader)
        fingerprint, reads_media = answer.fingerprint.tokenizer, reader is not None
        setup = EncodeSetup(str(path), fingerprint, size, most, ENCODE_MEMORY_BYTES, reads_media)
        self._processes = EncodeProcesses(setup, settings.threads)
        if info.chat_template:
            self._renderer = Renderer(
                info.chat_template,
                info.special_tokens,
                control_tokens=_control_tokens(settings, info, tokenizer, [] if reader is None else reader.marks),
                num_workers=settings.render_workers,
                seconds=settings.render_timeout,
            )
            await self._renderer.start()
            answer.tool_format_json = output_format.described(self._renderer.tool_format, tokenizer)
        metrics = TokenizerMetrics(host.metrics, host.bill)
        room = settings.chunk_cache_bytes
        long_texts = LongTexts(encoder, self._processes, metrics.cached_tokens, room)
        self._servicer = TokenizerServicer(
            encoder, self._renderer, long_texts, answer, metrics, settings.threads, reader, transcripts
        )
        host.add_servicer(add_servicer, self._servicer)

    async def drain(self) -> None:
        """Do nothing: the server lets running calls end, and nothing is kept between calls."""

    async def stop(self) -> None:
        if self._renderer is not None:
            await self._renderer.close()
        if self._processes is not None:
            await self._processes.close()
        if self._servicer is not None:
            await self._servicer.close()


def _control_tokens(
    settings: TokenizerSettings, info: CheckpointInfo, tokenizer: Tokenizer, marks: Sequence[str]
) -> list[str]:
    """Return the tokens that clients may not write in their texts. ``marks``: what templates write for images, videos
    or sounds, which need not be tokens."""
    if settings.spelled_tokens == "control":
        return []
    return [*output_format.control_tokens(tokenizer, info.chat_template), *marks]


def _reader(path: Path, tokenizer: Tokenizer) -> "MediaReader | None":
    """Return how the model's images or sounds stand in prompts; None: it reads none."""
    if not any((path / name).is_file() for name in IMAGE_FILES):
        return None
    from .media.media_reader import MediaReader  # here: most models read none

    return MediaReader.of_checkpoint(path, tokenizer)


def _transcripts(path: Path, tokenizer: Tokenizer) -> "TranscriptPrompts | None":
    """Return what writes the prompts of a model that transcribes; None: it does not."""
    if not any((path / name).is_file() for name in IMAGE_FILES):
        return None
    from .media.transcript_prompts import TranscriptPrompts  # here: most models read text only

    return TranscriptPrompts.of_checkpoint(path, tokenizer)


def _load(settings: TokenizerSettings) -> tuple[CheckpointInfo, Tokenizer, GetTokenizerInfoResponse]:
    path = resolve(settings.model, weights=False)
    info, tokenizer = CheckpointInfo.load(path), load_tokenizer(path)
    if settings.chat_template:
        info = replace(info, chat_template=read_chat_template(settings.chat_template, settings.plugins))
    name = settings.served_model_name or served_name(path, settings.model)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    answer = GetTokenizerInfoResponse(
        fingerprint=Fingerprint(model=name, tokenizer=tokenizer_fingerprint(path)),
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        eos_token_ids=info.eos_token_ids,
        has_chat_template=bool(info.chat_template),
        default_sampling_params=info.default_sampling_params,
        # With it a gateway refuses a text that cannot fit the context before it is encoded.
        max_token_bytes=max((len(token.encode()) for token in vocabulary), default=0),
        tool_call_parser=output_format.tool_call_parser(info.chat_template),
        reasoning_parser=format_of_template(info.chat_template),
        special_marks=output_format.special_marks(tokenizer),
        max_sentence_tokens=0 if info.vector_texts is None else info.vector_texts.max_tokens,
    )
    return info, tokenizer, answer
