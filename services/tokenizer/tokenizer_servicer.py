"""Serves ``Tokenizer``: encodes texts and chats, decodes, and describes the tokenizer."""

import time
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS
from tokenloom.v1 import types_pb2
from tokenloom.v1.tokenizer_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EncodeChatRequest,
    EncodeChatResponse,
    EncodeRequest,
    EncodeResponse,
    GetTokenizerInfoRequest,
    GetTokenizerInfoResponse,
)
from tokenloom.v1.tokenizer_pb2_grpc import TokenizerServicer as TokenizerServicerBase

from .encoder import PromptTruncation, TextEncoder
from .render_worker import RenderJob
from .renderer import Renderer

_Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerMetrics:
    """Counts tokens, and measures the calls that were answered, by method."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tokenloom_tokenizer_"
        self.tokens = Counter(registry, name + "tokens", "Tokens that encoding made or that were decoded.", {})
        self.encode, self.encode_chat, self.decode = (
            Histogram(
                registry, f"{name}{method}_seconds", f"Seconds that a call of {method} took.", {}, LATENCY_SECONDS
            )
            for method in ("encode", "encode_chat", "decode")
        )


class TokenizerServicer(TokenizerServicerBase):
    """Answers calls without state: any replica can answer, and any call may be retried."""

    def __init__(
        self, encoder: TextEncoder, renderer: Renderer | None, info: GetTokenizerInfoResponse, metrics: TokenizerMetrics
    ) -> None:
        """``renderer``: None when the model has no chat template."""
        self._encoder = encoder
        self._renderer = renderer
        self._info = info
        self._metrics = metrics

    async def Encode(self, request: EncodeRequest, context: _Context) -> EncodeResponse:
        started = time.monotonic()
        prompts = await self._encoder.encode(
            request.texts,
            add_special_tokens=request.add_special_tokens,
            want_hashes=request.want_hashes,
            salt=request.cache_salt,
            want_token_strings=request.want_token_strings,
            second_texts=request.second_texts,
            cut=PromptTruncation(request.max_tokens, request.keep_first) if request.max_tokens else None,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        )
        self._metrics.encode.observe(time.monotonic() - started)
        self._metrics.tokens.inc(sum(len(prompt.token_ids) for prompt in prompts))
        return EncodeResponse(prompts=prompts)

    async def EncodeChat(self, request: EncodeChatRequest, context: _Context) -> EncodeChatResponse:
        if self._renderer is None:
            raise errors.InvalidArgument("This model has no chat template; send a plain prompt instead.", "messages")
        started = time.monotonic()
        rendered = await self._renderer.render(_job(request))
        (prompt,) = await self._encoder.encode_chat(
            rendered,
            want_hashes=request.want_hashes,
            salt=request.cache_salt,
            want_token_strings=request.want_token_strings,
        )
        self._metrics.encode_chat.observe(time.monotonic() - started)
        prompt.reasoning_start = getattr(types_pb2, f"REASONING_START_{rendered.reasoning_start}")
        self._metrics.tokens.inc(len(prompt.token_ids))
        return EncodeChatResponse(prompt=prompt)

    async def Decode(self, request: DecodeRequest, context: _Context) -> DecodeResponse:
        started = time.monotonic()
        text = await self._encoder.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
        self._metrics.decode.observe(time.monotonic() - started)
        self._metrics.tokens.inc(len(request.token_ids))
        return DecodeResponse(text=text)

    async def GetTokenizerInfo(self, request: GetTokenizerInfoRequest, context: _Context) -> GetTokenizerInfoResponse:
        return self._info


def _job(request: EncodeChatRequest) -> RenderJob:
    texts = []
    for field, data in (
        ("messages", request.messages_json),
        ("tools", request.tools_json),
        ("chat_template_kwargs", request.template_kwargs_json),
    ):
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise errors.InvalidArgument(f"{field} is not UTF-8.", field) from None
    messages, tools, template_kwargs = texts
    return RenderJob(
        messages_json=messages,
        tools_json=tools,
        template_kwargs_json=template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
