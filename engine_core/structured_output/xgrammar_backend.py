"""Implements grammars with xgrammar, which compiles in full: the compiler's process sends the compiled form."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xgrammar  # pyright: ignore[reportMissingImports]  # comes with the extra of that name

from ..data.core_params import GrammarKind, StructuredOutput
from .grammar_backend import Bitmask, GrammarError, close_objects

_MAX_WHITESPACE = 20
"""Limits the blanks between two JSON tokens, so that a model cannot stay in a loop of them."""
_MAX_ERROR_CHARS = 300
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?")


class XGrammarBackend:
    """Implements ``StructuredOutputBackend``."""

    # Eight times what llguidance gets: xgrammar compiles in full, and its result moves between processes, so the core
    # compiles nothing.
    COMPILE_BYTES = 512 << 20

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        disable_any_whitespace: bool = False,
    ) -> None:
        """Load the tokenizer of a model with ``vocab_size`` logits.

        ``disable_any_whitespace``: nothing may stand between two tokens of JSON, whatever a request asks for.
        """
        self._disable_any_whitespace = disable_any_whitespace
        source = tokenizer_file.read_text()
        metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(source)
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer = xgrammar.TokenizerInfo(
            _vocabulary(json.loads(source), vocab_size), vocab_size=vocab_size, stop_token_ids=eos or None, **metadata
        )
        # One thread and no cache, because GrammarCompiler has its own.
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)
        self.eos_token_ids = tuple(self._tokenizer.stop_token_ids)

    def prepare(self, constraint: StructuredOutput) -> str:
        """Return the compiled grammar, serialized."""
        if constraint.whitespace_pattern is not None:
            raise GrammarError(
                "whitespace_pattern is not supported by the engine's backend xgrammar; use disable_any_whitespace"
            )
        try:
            compiled: str = self._compile(constraint).serialize_json()
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_fit_for_a_client(str(error))) from None
        return compiled

    def load(self, prepared: str) -> "_Compiled":
        return _Compiled(xgrammar.CompiledGrammar.deserialize_json(prepared, self._tokenizer))

    def _compile(self, constraint: StructuredOutput) -> Any:
        source = constraint.source
        match constraint.kind:
            case GrammarKind.JSON:
                return self._compile_json(close_objects(source), constraint)
            case GrammarKind.JSON_OBJECT:
                return self._compile_json('{"type": "object"}', constraint)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(_with_limits(source))
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(source)
            case GrammarKind.CHOICE:
                texts = (json.dumps(text) for text in json.loads(source))
                return self._compiler.compile_grammar(f"root ::= {' | '.join(texts)}")
            case GrammarKind.GRAMMAR:
                return self._compiler.compile_grammar(source)

    def _compile_json(self, schema: str, constraint: StructuredOutput) -> Any:
        if self._disable_any_whitespace or constraint.disable_any_whitespace:
            # With its own separators xgrammar writes `{"a": 1}` here and llguidance `{"a":1}`; both write the latter.
            return self._compiler.compile_json_schema(
                schema, strict_mode=False, any_whitespace=False, separators=(",", ":")
            )
        return self._compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE)


def _with_limits(source: str) -> str:
    """Return a structural tag with closed objects and a limit on blanks, as in JSON schemas by themselves."""

    def limited(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") == "json_schema" and isinstance(part.get("json_schema"), dict):
            part["json_schema"] = json.loads(close_objects(json.dumps(part["json_schema"])))
            part.setdefault("max_whitespace_cnt", _MAX_WHITESPACE)
        if part.get("type") == "regex":
            part = {name: value for name, value in part.items() if name not in ("also", "excludes")}
        return part

    return json.dumps(json.loads(source, object_hook=limited))


class _Compiled:
    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def start(self) -> "_Grammar":
        return _Grammar(self._compiled)


class _Grammar:
    def __init__(self, compiled: Any) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if not all(self._matcher.accept_token(token_id) for token_id in token_ids):
            raise GrammarError("a token does not follow the grammar")

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        num_valid = 0
        while num_valid < len(token_ids) and self._matcher.accept_token(token_ids[num_valid]):
            num_valid += 1
        self._matcher.rollback(num_valid)
        return num_valid

    def rollback(self, num_tokens: int) -> None:
        try:
            self._matcher.rollback(num_tokens)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(str(error)) from None

    def reset(self) -> None:
        self._matcher.reset()

    def fill_bitmask(self, row: Bitmask) -> None:
        self._matcher.fill_next_token_bitmask(row[None, :])


def _fit_for_a_client(message: str) -> str:
    """Return the message without the time and the source line that the library adds."""
    if "bad_alloc" in message:
        return "it takes too much memory to compile"
    return " ".join(_WHERE.sub("", message).split())[:_MAX_ERROR_CHARS]


def _vocabulary(tokenizer: Any, vocab_size: int) -> list[str]:
    """Return the [vocab_size] tokens of a ``tokenizer.json`` in its own spelling; empty for ids without a token."""
    vocabulary = [""] * vocab_size
    tokens = tokenizer["model"]["vocab"]
    pairs = tokens.items() if isinstance(tokens, dict) else ((token, id_) for id_, (token, _) in enumerate(tokens))
    added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", ()))
    for token, token_id in (*pairs, *added):
        if token_id < vocab_size:
            vocabulary[token_id] = token
    return vocabulary
