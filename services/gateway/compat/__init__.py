"""Lists the request fields of other servers' APIs, and what this gateway does with each.

The gateway reads from the lists which known fields it ignores, the documentation renders them, and
``tests/services/gateway/compat`` sends every field to a gateway and proves what its row says.
"""

from collections.abc import Sequence

from . import anthropic_fields, embedding_fields, ollama_fields, openai_fields, responses_fields, vllm_fields
from .foreign_field import FieldEffect, ForeignApi

FOREIGN_APIS: Sequence[ForeignApi] = (
    openai_fields.CHAT,
    openai_fields.COMPLETIONS,
    responses_fields.RESPONSES,
    anthropic_fields.MESSAGES,
    ollama_fields.CHAT,
    vllm_fields.CHAT,
    vllm_fields.COMPLETIONS,
    embedding_fields.EMBEDDINGS,
    embedding_fields.CHAT_EMBEDDINGS,
)


def ignored_names() -> frozenset[str]:
    """Return the fields of bodies that some API ignores; not the members of such fields."""
    # One list serves the gateway, the documentation and the tests, so that a row that is not true fails a test, and
    # clients learn from each response which of their fields had no effect.
    ignored = (row for api in FOREIGN_APIS for row in api.fields if row.outcome is FieldEffect.IGNORED)
    return frozenset(row.name for row in ignored if row.name == row.field)
