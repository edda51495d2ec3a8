"""Reasoning: what a model writes before its answer. Its formats, by the names that operators use."""

from collections.abc import Callable, Mapping

from .think import ThinkParser

ReasoningFormat = Callable[[bool], ThinkParser]
"""Makes a parser for one output, given whether the prompt has opened the reasoning."""

FORMATS: Mapping[str, ReasoningFormat] = {
    # Its first templates leave the opening mark to the model, which may omit it.
    "deepseek_r1": lambda opened: ThinkParser(inside=True),
    "qwen3": lambda opened: ThinkParser(inside=opened),
}
