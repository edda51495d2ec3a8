"""Prompts with embeddings, as clients write them."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.prompt_embeds import FIELD, Part
from tokenloom.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """Token ids and safetensors files in order; what is in them is checked later, against the limits."""

    parts: Sequence[Part]


def read_prompts(value: object) -> list[EmbedsPrompt]:
    """``prompt_embeds`` of a body: one prompt, or a list of prompts. A prompt is the base64 of a safetensors file, or a
    list of parts, ``{"token_ids": […]}`` and ``{"embeds": base64}``. Raises ``InvalidArgument``."""
    if isinstance(value, str):
        return [EmbedsPrompt([_decode(value)])]
    if not isinstance(value, list) or not value:
        raise InvalidArgument(f"{FIELD} must be base64, or a list of prompts that have embeddings", FIELD)
    if all(isinstance(item, Mapping) for item in value):
        return [_read_parts(value)]
    return [EmbedsPrompt([_decode(item)]) if isinstance(item, str) else _read_parts(item) for item in value]


def of_message(message: inference_pb2.PromptParts) -> EmbedsPrompt:
    """The same over gRPC."""
    parts: list[Part] = []
    for part in message.parts:
        parts.append(part.embeds if part.WhichOneof("part") == "embeds" else list(part.token_ids.ids))
    return EmbedsPrompt(parts)


def _read_parts(value: object) -> EmbedsPrompt:
    if not isinstance(value, list) or not value:
        raise InvalidArgument(f"{FIELD}: a prompt is base64 or a list of parts", FIELD)
    return EmbedsPrompt([_read_part(part) for part in value])


def _read_part(part: object) -> Part:
    if isinstance(part, Mapping) and len(part) == 1:
        if isinstance(token_ids := part.get("token_ids"), list):
            return token_ids
        if "embeds" in part:
            return _decode(part["embeds"])
    raise InvalidArgument(f'{FIELD}: a part is {{"token_ids": [...]}} or {{"embeds": base64}}', FIELD)


def _decode(text: object) -> bytes:
    if not isinstance(text, str):
        raise InvalidArgument(f"{FIELD} must be the base64 of a safetensors file", FIELD)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{FIELD} is not base64", FIELD) from None
