"""Prompt embeddings of a checked request, for the core."""

from collections.abc import Iterable

import numpy as np

from tokenloom.engine_core.wire.embedding_rows import EmbedsSpan
from tokenloom.v1 import types_pb2


def to_spans(embeds: Iterable[types_pb2.PromptEmbeds]) -> list[EmbedsSpan]:
    """Views of the message's bytes: nothing is copied."""
    return [EmbedsSpan(span.position, np.frombuffer(span.rows, "<f4").reshape(span.num_tokens, -1)) for span in embeds]
