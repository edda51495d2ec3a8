"""Backends by name."""

import hashlib
from pathlib import Path

from ..config import StructuredOutputConfig
from .grammar_backend import GrammarError, StructuredOutputBackend


def make_backend(config: StructuredOutputConfig, vocab_size: int) -> StructuredOutputBackend:
    """The backend that ``config`` names, for a model of ``vocab_size`` logits. Raises ``GrammarError`` saying what is
    missing: a tokenizer that is the configured one, the library."""
    file = Path(config.tokenizer)
    try:
        if hashlib.sha256(file.read_bytes()).digest() != config.tokenizer_digest:
            raise GrammarError("the engine's tokenizer file was changed after the engine began")
    except OSError:
        raise GrammarError("the engine's tokenizer file is gone") from None
    if config.backend == "xgrammar":
        return _xgrammar(file, vocab_size, config.eos_token_ids)
    from .llguidance_backend import LLGuidanceBackend  # loaded by the first request that needs it

    try:
        return LLGuidanceBackend(file, vocab_size, config.eos_token_ids)
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer is not supported: {error}") from None


def _xgrammar(file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> StructuredOutputBackend:
    try:
        from .xgrammar_backend import XGrammarBackend
    except ImportError as error:
        raise GrammarError(
            f"the backend xgrammar is not installed ({error.name}); pip install 'tokenloom[xgrammar]' brings it"
        ) from None
    return XGrammarBackend(file, vocab_size, eos_token_ids)
