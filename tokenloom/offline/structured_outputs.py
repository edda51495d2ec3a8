"""What an output must be, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenloom.request.output_constraints import narrow_structured_outputs
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
        return narrow_structured_outputs({field.name: getattr(self, field.name) for field in fields(self)})
