"""Provides clients of a running mesh, over the gateway's public gRPC API (``tokenloom.v1.Inference``).

:class:`Client` blocks, :class:`AsyncClient` is for asyncio; both have ``models``, ``generate``, ``stream``, ``chat``,
``stream_chat``, ``session``, ``embed``, ``classify``, ``score``, ``pool`` and ``transcribe``. Requests that the mesh
refuses raise one of :mod:`errors`, which name the field; requests that may succeed later are retried
(:class:`Retries`). The clients need neither torch nor a model.
"""

from tokenloom.offline.outputs import Logprob
from tokenloom.request import errors

from .answer_course import Retries
from .async_client import AsyncClient, AsyncSession, AsyncStream
from .options import ChatOptions, Message, Options
from .pooled import Pooled
from .results import Chunk, Generation, Model, Output, TimedText, Transcribed, Usage
from .sync_client import Client, Session, Stream
from .tool_calls import ToolCall, ToolCallDelta

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "ChatOptions",
    "Chunk",
    "Client",
    "Generation",
    "Logprob",
    "Message",
    "Model",
    "Options",
    "Output",
    "Pooled",
    "Retries",
    "Session",
    "Stream",
    "TimedText",
    "ToolCall",
    "ToolCallDelta",
    "Transcribed",
    "Usage",
    "errors",
]
