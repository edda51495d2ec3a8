"""Parses the reasoning that a model writes before its answer out of the text of an output."""

from collections.abc import Callable

from tokenloom.request.reasoning import ReasoningFormat

from .think import ThinkParser

OpenReasoning = Callable[[bool], ThinkParser]
"""Makes a parser for one output, given whether the prompt has opened the reasoning."""


def opener(reasoning: ReasoningFormat) -> OpenReasoning:
    """Return what makes the parsers of outputs in this format."""
    return lambda opened: ThinkParser(inside=opened or reasoning.begins_inside)
