"""Lists the formats of tool calls, and chooses the parsers that read the turns of the served model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.reasoning import ReasoningFormat, reasoning_format
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..formats import hermes, llama3_json, mistral
from ..formats.hermes import HermesParser
from ..formats.llama3_json import Llama3JsonParser
from ..formats.strict_calls import NamedCall, RequiredCalls, constraint_of, has_strict, strict_constraint
from ..formats.think import opener
from ..formats.tool_parser import ToolFormat, ToolParser, new_call_id
from ..formats.tool_request import ToolChoice, ToolRequest
from ..records.generate_request import GenerateRequest
from .parsed_message import MessagePlan

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), marks=hermes.MARKS),
    "llama3_json": ToolFormat(Llama3JsonParser, keeps_special_tokens=True, marks=llama3_json.MARKS),
    "mistral": ToolFormat(
        lambda names: mistral.MistralParser(), keeps_special_tokens=True, new_call_id=mistral.new_call_id
    ),
}


UNBOUND_STRICT = "tools[].function.strict"
"""Names the member of a tool that has no effect for a model whose calls have no certain form."""
AUTO = "auto"
"""Setting: what the tokenizer reports of the chat template."""


@dataclass(frozen=True, slots=True)
class MessagePlans:
    """Knows the formats of the served model's turns, and plans how a request's turns are read."""

    tools: ToolFormat | None = None
    """How it writes calls; None: unknown."""
    reasoning: ReasoningFormat | None = None
    """How it writes reasoning; None: it does not, or reasoning is treated as text."""

    @classmethod
    def choose(
        cls, tool_parser: str, reasoning_parser: str, info: tokenizer_pb2.GetTokenizerInfoResponse
    ) -> "MessagePlans":
        """Choose by the operator's settings or, where these are ``auto``, by what the tokenizer reports.

        An unknown name, as of a newer tokenizer, counts as none.
        """
        return cls(
            FORMATS.get(info.tool_call_parser if tool_parser == AUTO else tool_parser),
            reasoning_format(reasoning_parser, info.reasoning_parser),
        )

    def apply(self, request: ToolRequest, job: GenerateRequest, *, include_reasoning: bool) -> MessagePlan | None:
        """Add the constraints of a chat's tools to ``job``, and return how its turns are read; None: as plain text.

        Raises ``InvalidArgument`` for calls that cannot be forced together with the job's other constraints, or that
        could not be read.
        """
        if request.choice is ToolChoice.AUTO:
            self._bind_strict(job.sampling, request)
        elif request.choice is not ToolChoice.NONE:
            _constrain(job.sampling, request)
        if request.choice is ToolChoice.AUTO and self.tools is not None and self.tools.keeps_special_tokens:
            job.text.skip_special_tokens = False
        open_reasoning = None if self.reasoning is None else opener(self.reasoning)
        plan = MessagePlan(open_reasoning=open_reasoning, include_reasoning=include_reasoning)
        if request.choice is ToolChoice.NONE:
            return None if open_reasoning is None else plan
        return replace(
            plan,
            open_tools=self._opener(request),
            new_call_id=new_call_id if self.tools is None else self.tools.new_call_id,
            parallel_calls=request.parallel,
        )

    def ignored(self, request: ToolRequest) -> tuple[str, ...]:
        """Return the member of the tools that has no effect, if any."""
        is_bound = request.choice is not ToolChoice.AUTO or (self.tools is not None and self.tools.marks is not None)
        return () if is_bound or not has_strict(request.tools) else (UNBOUND_STRICT,)

    def _bind_strict(self, sampling: types_pb2.SamplingParams, request: ToolRequest) -> None:
        """Decode the arguments of strict tools under their schemas. Another constraint on the output comes first: it
        leaves no room for calls, unless it is a structural tag, which describes them itself."""
        if self.tools is None or self.tools.marks is None or sampling.HasField("structured_outputs"):
            return
        if (constraint := strict_constraint(request, self.tools.marks)) is not None:
            sampling.structured_outputs.CopyFrom(constraint)

    def _opener(self, request: ToolRequest) -> Callable[[], ToolParser]:
        if request.choice is ToolChoice.AUTO:
            if self.tools is None:
                raise InvalidArgument(
                    'tool_choice "auto" needs a parser for the calls of this model, which its chat template does not '
                    "name: start the gateway with --tool-call-parser",
                    "tool_choice",
                )
            return partial(self.tools.open, [tool.name for tool in request.tools])
        return RequiredCalls if request.named is None else partial(NamedCall, request.named.name)


def _constrain(sampling: types_pb2.SamplingParams, request: ToolRequest) -> None:
    """Decode a call that must be made under its schema."""
    if (constraint := constraint_of(request)) is None:
        return
    if sampling.HasField("structured_outputs"):
        raise InvalidArgument(
            "a tool_choice that forces a call excludes response_format and structured_outputs", "tool_choice"
        )
    sampling.structured_outputs.CopyFrom(constraint)
