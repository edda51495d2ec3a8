"""What an output must be, with vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenloom.services.runtime.errors import InvalidArgument
from tokenloom.v1 import types_pb2


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, or its source."""
    regex: str | None = None
    """What the text as a whole matches."""
    choice: Sequence[str] | None = None
    """The texts to choose from."""
    grammar: str | None = None
    """A context-free grammar in EBNF."""
    json_object: bool | None = None
    """Any JSON object."""

    def to_wire(self) -> types_pb2.StructuredOutputs:
        """Raises ``InvalidArgument`` unless exactly one constraint is set, to a value of its type."""
        named = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(named) != 1:
            raise InvalidArgument(
                f"structured_outputs must have exactly one constraint, not {', '.join(named) or 'none'}",
                "structured_outputs",
            )
        (name,) = named
        value = getattr(self, name)
        try:
            if name == "json" and not isinstance(value, str):
                value = json.dumps(value)
            if name == "choice":
                value = types_pb2.Choices(texts=[value] if isinstance(value, str) else value)
            return types_pb2.StructuredOutputs(**{name: value})
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"structured_outputs.{name}: {error}", "structured_outputs") from None
