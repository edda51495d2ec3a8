"""Outputs that must be something: what the engine core is told of a checkpoint, and of a request."""

import hashlib
import json
from pathlib import Path

from msgspec.structs import replace

from tokenloom.checkpoint import CheckpointInfo
from tokenloom.engine_core.config import StructuredOutputConfig
from tokenloom.engine_core.wire.core_sampling_params import GrammarKind, StructuredOutput
from tokenloom.v1 import types_pb2


def structured_output_config(
    checkpoint: Path, chosen: StructuredOutputConfig | None = None
) -> StructuredOutputConfig | None:
    """Complete the configuration for the model in this directory.

    Returns None if the model has no ``tokenizer.json``, so that its outputs cannot be constrained.
    """
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return None
    return replace(
        chosen or StructuredOutputConfig(),
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
    )


def to_core_structured_output(params: types_pb2.SamplingParams) -> StructuredOutput | None:
    """A valid request's constraint; None: any text."""
    if not params.HasField("structured_outputs"):
        return None
    constraint = params.structured_outputs
    kind = GrammarKind(constraint.WhichOneof("constraint"))
    if kind is GrammarKind.JSON_OBJECT:
        return StructuredOutput(kind)
    if kind is GrammarKind.CHOICE:
        return StructuredOutput(kind, json.dumps(list(constraint.choice.texts)))
    return StructuredOutput(kind, getattr(constraint, kind))
