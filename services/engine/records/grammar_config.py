"""Completes the engine's configuration of grammars and reasoning with what a checkpoint says.

It stands apart from the settings because it takes protobuf, and the help of a command needs only the options.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from tokenloom.engine_core.data.config import ReasoningConfig, StructuredOutputConfig
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_file
from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.errors import NotFound
from tokenloom.request.reasoning import ReasoningFormat, ReasoningMarks, format_of_template, marks_of, reasoning_format
from tokenloom.v1 import types_pb2


def structured_output_config(
    checkpoint: Path, chosen: StructuredOutputConfig | None = None
) -> StructuredOutputConfig | None:
    """Complete the configuration for the model in this directory or GGUF file.

    Returns None if the model has no ``tokenizer.json``, so that its outputs cannot be constrained.
    """
    file = tokenizer_file(checkpoint)
    if file is None:
        return None
    return replace(
        chosen or StructuredOutputConfig(),
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
    )


def reasoning_config(
    checkpoint: Path, chosen: ReasoningConfig, chat_template: str | None = None, plugins: Sequence[str] = ()
) -> ReasoningConfig:
    """Complete the configuration with the tokens that mark the reasoning of the model in this directory.

    ``chat_template``: its source, if it is not the checkpoint's own. ``plugins``: the packages that a parser may name.

    Raises ``ValueError`` if the model's tokenizer cannot write the marks of a parser that was chosen by name.
    """
    template = CheckpointInfo.load(checkpoint).chat_template if chat_template is None else chat_template
    found = reasoning_format(chosen.parser, format_of_template(template), plugins)
    if found is None:
        return chosen
    if (marks := _marks(checkpoint, found)) is not None:
        return replace(chosen, marks=marks)
    problem = f"the model's tokenizer cannot write {found.start} and {found.end}"
    if chosen.parser != "auto":
        raise ValueError(f"reasoning_parser is {chosen.parser}, but {problem}; set it to none")
    OF_PROCESS.begin("no_reasoning", problem)
    return chosen


def reasoning_mode(config: ReasoningConfig, *, finds_reasoning: bool) -> types_pb2.ReasoningMode:
    """Return how an engine treats reasoning. ``finds_reasoning``: it knows the marks of the model."""
    if not finds_reasoning:
        return types_pb2.REASONING_MODE_UNSPECIFIED
    if config.enable_in_reasoning:
        return types_pb2.REASONING_MODE_CONSTRAINED
    return types_pb2.REASONING_MODE_FREE


def _marks(checkpoint: Path, found: ReasoningFormat) -> ReasoningMarks | None:
    try:
        tokenizer = load_tokenizer(checkpoint)
    except NotFound:
        return None
    marks = marks_of(found, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    # A tokenizer without the mark encodes it into unknown tokens, which any unknown text would match. So the ids are
    # decoded again and compared.
    written = [tokenizer.decode(list(mark), skip_special_tokens=False).strip() for mark in (marks.start, marks.end)]
    return marks if written == [found.start, found.end] else None
