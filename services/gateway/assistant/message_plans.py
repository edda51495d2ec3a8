"""Which parsers read the turns of the served model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2

from ..generation.job import Job
from ..reasoning.reasoning_parsers import FORMATS as REASONING_FORMATS
from ..reasoning.reasoning_parsers import ReasoningFormat
from ..tools.call_id import new_call_id
from ..tools.forced import NamedCall, RequiredCalls, constraint_of
from ..tools.tool_parser import ToolFormat, ToolParser
from ..tools.tool_parsers import find_format
from ..tools.tool_request import ToolChoice, ToolRequest
from .parsed_message import MessagePlan

AUTO = "auto"
"""As the chat template tells."""


@dataclass(frozen=True, slots=True)
class MessagePlans:
    """What a gateway knows of its model's turns."""

    tools: ToolFormat | None = None
    """How it writes calls; None: not known."""
    reasoning: ReasoningFormat | None = None
    """How it writes reasoning; None: it does not, or it is text as any other."""

    @classmethod
    def choose(cls, tool_parser: str, reasoning_parser: str, *, told_tools: str, told_reasoning: str) -> "MessagePlans":
        """By the operator's choice or, where that is ``auto``, by what the tokenizer tells of the template."""
        return cls(
            find_format(told_tools if tool_parser == AUTO else tool_parser),
            REASONING_FORMATS.get(told_reasoning if reasoning_parser == AUTO else reasoning_parser),
        )

    def apply(self, request: ToolRequest, job: Job, *, include_reasoning: bool) -> MessagePlan | None:
        """Puts what a chat's tools ask of its output into ``job``, and tells how its turns are read; None: as they are.
        Raises ``InvalidArgument`` for calls that cannot be forced beside what else is asked, or could not be read."""
        _constrain(job.sampling, request)
        if request.choice is ToolChoice.AUTO and self.tools is not None and self.tools.keeps_special_tokens:
            job.text.skip_special_tokens = False
        # What is JSON or the like throughout has no reasoning.
        reasoning = None if job.sampling.HasField("structured_outputs") else self.reasoning
        plan = MessagePlan(open_reasoning=reasoning, include_reasoning=include_reasoning)
        if request.choice is ToolChoice.NONE:
            return None if reasoning is None else plan
        return replace(
            plan,
            open_tools=self._opener(request),
            new_call_id=new_call_id if self.tools is None else self.tools.new_call_id,
            parallel_calls=request.parallel,
        )

    def _opener(self, request: ToolRequest) -> Callable[[], ToolParser]:
        if request.choice is ToolChoice.AUTO:
            if self.tools is None:
                raise InvalidArgument(
                    'tool_choice "auto" needs a parser for the calls of this model, which its chat template does not '
                    "tell: start the gateway with --tool-call-parser",
                    "tool_choice",
                )
            return partial(self.tools.parser, [tool.name for tool in request.tools])
        return RequiredCalls if request.named is None else partial(NamedCall, request.named.name)


def _constrain(sampling: types_pb2.SamplingParams, request: ToolRequest) -> None:
    """A call that must be made is decoded under its schema."""
    if (constraint := constraint_of(request)) is None:
        return
    if sampling.HasField("structured_outputs"):
        raise InvalidArgument(
            "a tool_choice that forces a call excludes response_format and structured_outputs", "tool_choice"
        )
    sampling.structured_outputs.CopyFrom(constraint)
