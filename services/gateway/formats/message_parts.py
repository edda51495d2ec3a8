"""Defines the parts of an assistant's turn, in the order in which the model writes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More arguments of the call that began last: JSON as the model writes it."""

    text: str


Part = Content | ReasoningText | CallBegin | CallArguments
ToolPart = Content | CallBegin | CallArguments
"""What the text after the reasoning may hold."""
TextPart = Content | ReasoningText
"""What is separated before the text is searched for tool calls."""
