"""Formats of tool calls by the names that operators give."""

from collections.abc import Mapping

from .hermes import HermesFormat
from .llama3_json import Llama3JsonFormat
from .mistral import MistralFormat
from .tool_parser import ToolFormat

FORMATS: Mapping[str, type[ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
}


def find_format(name: str) -> ToolFormat | None:
    """None for a name that is not known: of a newer tokenizer, or of none."""
    format_ = FORMATS.get(name)
    return None if format_ is None else format_()
