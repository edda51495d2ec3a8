"""Reads prompt embeddings from safetensors bytes, joins them with token ids, and checks them.

Nothing is allocated before shape and size are known to be right. numpy is imported only where it is needed, because
most gateways never receive embeddings.
"""

import json
import math
import struct
from collections.abc import Sequence

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .narrowing import narrow_token_ids

FIELD = "prompt_embeds"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 64 << 10

Part = Sequence[object] | bytes
"""Token ids, or a safetensors file with one tensor [n, hidden_size]."""


def join_parts(parts: Sequence[Part], limits: types_pb2.ModelLimits) -> types_pb2.Prompt:
    """Return one prompt of token ids and embeddings in order. Raises ``InvalidArgument``."""
    check_enabled(limits)
    prompt = types_pb2.Prompt()
    for part in parts:
        if not isinstance(part, bytes):
            prompt.token_ids.extend(narrow_token_ids(FIELD, part))
            continue
        room = limits.max_model_len - 1 - len(prompt.token_ids)
        rows = read_safetensors(part, limits.hidden_size, room)
        num_tokens = len(rows) // (4 * limits.hidden_size)
        prompt.embeds.add(position=len(prompt.token_ids), num_tokens=num_tokens, rows=rows)
        prompt.token_ids.extend([0] * num_tokens)
    return prompt


def read_safetensors(data: bytes, hidden_size: int, max_tokens: int) -> bytes:
    """Return the rows of the one tensor in ``data`` in the form of ``PromptEmbeds``. Raises ``InvalidArgument`` unless
    its shape is [1..max_tokens, hidden_size]."""
    dtype, shape, body = _read_header(data)
    if len(shape) != 2 or shape[1] != hidden_size or not shape[0] >= 1:
        raise InvalidArgument(f"{FIELD} has shape {list(shape)}, expected [n >= 1, {hidden_size}]", FIELD)
    if shape[0] > max_tokens:
        raise InvalidArgument(f"{FIELD} has {shape[0]} rows; the model's context has room for {max_tokens}", FIELD)
    if dtype == "F32":
        return body
    import numpy as np

    if dtype == "F16":
        return np.frombuffer(body, "<f2").astype("<f4").tobytes()
    return (np.frombuffer(body, "<u2").astype("<u4") << 16).tobytes()  # the upper half of a float32


def check_embeds(prompt: types_pb2.Prompt, params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits) -> None:
    """Check the embeddings of a prompt, if it has any. Raises ``InvalidArgument``."""
    if not prompt.embeds:
        return
    check_enabled(limits)
    if params.HasField("prompt_logprobs"):
        raise InvalidArgument(f"prompt_logprobs is not available with {FIELD}", "prompt_logprobs")
    end = 0
    for span in prompt.embeds:
        if span.position < end or not span.num_tokens or span.position + span.num_tokens > len(prompt.token_ids):
            raise InvalidArgument(f"{FIELD} overlap, are empty, or lie outside the prompt", FIELD)
        end = span.position + span.num_tokens
        if len(span.rows) != span.num_tokens * limits.hidden_size * 4:
            raise InvalidArgument(
                f"{FIELD}: {len(span.rows)} bytes for {span.num_tokens} rows of {limits.hidden_size} float32", FIELD
            )
        _check_finite(span.rows)


def check_enabled(limits: types_pb2.ModelLimits) -> None:
    """Raise ``InvalidArgument`` if no engine accepts embeddings."""
    if not limits.hidden_size:
        raise InvalidArgument(f"{FIELD} is disabled: start the engine with --enable-prompt-embeds", FIELD)


def _read_header(data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, content) of the file's only tensor."""
    # A file of torch.save is a pickle, which runs code when it is read.
    if data[:2] == b"PK":
        raise InvalidArgument(f"{FIELD} must be a safetensors file; torch.save files are not accepted", FIELD)
    header_bytes = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise InvalidArgument(f"{FIELD} is not a safetensors file", FIELD)
    try:
        header = json.loads(data[8 : 8 + header_bytes])
        (entry,) = [entry for name, entry in header.items() if name != "__metadata__"]
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidArgument(f"{FIELD} must be a safetensors file with one tensor", FIELD) from None
    if dtype not in _ITEM_BYTES:
        raise InvalidArgument(f"{FIELD} has dtype {dtype!r:.20}, expected {', '.join(_ITEM_BYTES)}", FIELD)
    if any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
        raise InvalidArgument(f"{FIELD} is not a safetensors file", FIELD)
    body = data[8 + header_bytes :]
    if (begin, end) != (0, len(body)) or len(body) != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise InvalidArgument(f"{FIELD} has {len(body)} bytes for shape {list(shape)} of {dtype}", FIELD)
    return dtype, shape, body


def _check_finite(rows: bytes) -> None:
    import numpy as np

    if not np.isfinite(np.frombuffer(rows, "<f4")).all():
        raise InvalidArgument(f"{FIELD} holds NaN or infinities", FIELD)
