"""Lists the formats of tool calls, and chooses the parsers that read the turns of the served model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tokenloom.request import bad_words
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.reasoning import ReasoningFormat, reasoning_format
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..formats import hermes, llama3_json, mistral
from ..formats.hermes import HermesParser
from ..formats.llama3_json import Llama3JsonParser
from ..formats.strict_calls import NamedCall, RequiredCalls, constraint_of, has_strict, strict_constraint
from ..formats.think import opener
from ..formats.tool_parser import ToolFormat, ToolParser, new_call_id
from ..formats.tool_request import Tool, ToolChoice, ToolRequest
from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import GenerateRequest
from .parsed_message import MessagePlan

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), marks=hermes.MARKS, openings=(hermes.START,)),
    "llama3_json": ToolFormat(
        Llama3JsonParser, keeps_special_tokens=True, marks=llama3_json.MARKS, openings=llama3_json.OPENINGS
    ),
    "mistral": ToolFormat(
        lambda names: mistral.MistralParser(),
        keeps_special_tokens=True,
        new_call_id=mistral.new_call_id,
        openings=(mistral.START,),
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
    special_marks: frozenset[str] = frozenset()
    """Marks that are special tokens, which texts otherwise do not contain."""
    hides_unused_tools: bool = False
    """Whether the model does not see tools that it may not call."""
    openings: Sequence[Sequence[int]] = ()
    """The tokens with which calls begin."""

    @classmethod
    def choose(
        cls,
        tool_parser: str,
        reasoning_parser: str,
        info: tokenizer_pb2.GetTokenizerInfoResponse,
        *,
        hides_unused_tools: bool = False,
    ) -> "MessagePlans":
        """Choose by the operator's settings or, where these are ``auto``, by what the tokenizer reports.

        An unknown name, as of a newer tokenizer, counts as none.
        """
        return cls(
            FORMATS.get(info.tool_call_parser if tool_parser == AUTO else tool_parser),
            reasoning_format(reasoning_parser, info.reasoning_parser),
            frozenset(info.special_marks),
            hides_unused_tools,
        )

    async def with_openings(self, tokenizers: TokenizerClient) -> "MessagePlans":
        """Return the same, with the tokens with which calls begin."""
        if self.tools is None:
            return self
        texts = bad_words.spellings(self.tools.openings)
        encoded = (await tokenizers.encode(texts, add_special_tokens=False)).prompts
        found = types_pb2.SamplingParams()
        bad_words.forbid(found, [prompt.token_ids for prompt in encoded])
        return replace(self, openings=[list(sequence.ids) for sequence in found.bad_words])

    def shown(self, request: ToolRequest) -> Sequence[Tool]:
        """Return the tools that the model sees."""
        return () if self.hides_unused_tools and request.choice is ToolChoice.NONE else request.tools

    def apply(
        self, request: ToolRequest, generate_request: GenerateRequest, *, include_reasoning: bool
    ) -> tuple[MessagePlan | None, Sequence[str]]:
        """Add the constraints of a chat's tools to the request, and return how its turns are read, None: as plain text,
        and the members of the tools that have no effect.

        A call that is forced replaces the request's own constraint. Raises ``InvalidArgument`` for schemas that cannot
        be enforced, and for calls that could not be read.
        """
        unbound: Sequence[str] = ()
        if request.choice is ToolChoice.AUTO:
            unbound = self._bind_strict(generate_request.sampling, request)
        elif (bound := constraint_of(request)) is not None:
            constraint, unbound = bound
            generate_request.sampling.structured_outputs.CopyFrom(constraint)
        elif self.shown(request) and not generate_request.sampling.HasField("structured_outputs"):
            # The prompt stays that of other choices, whose blocks are cached. A grammar decides what may come.
            for token_ids in self.openings:
                generate_request.sampling.bad_words.add(ids=token_ids)
        if self._keeps_special_tokens(request):
            generate_request.text.skip_special_tokens = False
        open_reasoning = None if self.reasoning is None else opener(self.reasoning)
        plan = MessagePlan(open_reasoning=open_reasoning, include_reasoning=include_reasoning)
        if request.choice is ToolChoice.NONE:
            return (None if open_reasoning is None else plan), unbound
        return (
            replace(
                plan,
                open_tools=self._opener(request),
                new_call_id=new_call_id if self.tools is None else self.tools.new_call_id,
                parallel_calls=request.parallel,
            ),
            unbound,
        )

    def _keeps_special_tokens(self, request: ToolRequest) -> bool:
        """Return whether the parsers read marks that are special tokens."""
        if self.reasoning is not None and not self.special_marks.isdisjoint(self.reasoning[:2]):
            return True
        if self.tools is None or request.choice is not ToolChoice.AUTO:
            return False
        return self.tools.keeps_special_tokens or not self.special_marks.isdisjoint(self.tools.openings)

    def _bind_strict(self, sampling: types_pb2.SamplingParams, request: ToolRequest) -> Sequence[str]:
        """Decode the arguments of strict tools under their schemas; return the member of tools that has no effect.

        Another constraint on the output comes first: it leaves no room for calls, unless it is a structural tag, which
        describes them itself.
        """
        if self.tools is None or self.tools.marks is None:
            return (UNBOUND_STRICT,) if has_strict(request.tools) else ()
        if sampling.HasField("structured_outputs"):
            return ()
        if (constraint := strict_constraint(request, self.tools.marks)) is not None:
            sampling.structured_outputs.CopyFrom(constraint)
        return ()

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
