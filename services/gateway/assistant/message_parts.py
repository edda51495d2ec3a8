"""What an assistant's turn is made of, in the order in which the model writes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last, JSON as the model writes it."""

    text: str


Part = Content | Reasoning | CallBegin | CallArguments
ToolPart = Content | CallBegin | CallArguments
"""What is in the text after the reasoning."""
TextPart = Content | Reasoning
"""What is told apart before tool calls are looked for."""
