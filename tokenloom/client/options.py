"""Lists the keyword arguments of the client's methods; sampling parameters come from their table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NotRequired, ParamSpec, TypeAlias, TypedDict, TypeVar, cast

from tokenloom.request.sampling_params import GenerationFields

from .tool_calls import Tool, ToolCall, ToolChoice

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
Prompt: TypeAlias = str | Sequence[int]
"""A text or token ids."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: NotRequired[str | None]
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[ToolCall]]
    """In an assistant's turn: the calls that it made."""
    tool_call_id: NotRequired[str]
    """In a tool's turn: the call whose result it is."""
    reasoning: NotRequired[str]
    """In an assistant's turn: its reasoning, for templates that use it."""


class Options(GenerationFields, kw_only=True):
    """How to generate. An option that is left out takes the model's default, otherwise the mesh's."""

    truncate_prompt_tokens: int | None = None
    """Keep only so many of the prompt's last tokens; -1: as many as leave room for the answer."""
    add_special_tokens: bool = True
    return_prompt_token_ids: bool = False
    return_timeline: bool = False
    use_beam_search: bool = False
    """Search the ``n`` likeliest outputs instead of sampling; not in streams and sessions."""
    length_penalty: float | None = None
    """With ``use_beam_search``: exponent of the length by which scores are divided; default 1."""
    priority: int = 0
    ttft_deadline: float | None = None
    """Seconds in which the first token must come: the request is refused at once unless that can be promised."""
    session: str = ""
    """Names the session of which the request is a turn: it runs where the KV of the turns before lies. Only a hint."""
    keep_seconds: int = 0
    """How long the prompt is worth keeping in the cache; 0: the mesh decides. Only a hint."""
    request_id: str = ""
    """Echoed in the call's metadata and in logs; never an identity."""


class ChatOptions(Options, kw_only=True):
    """Options of chats: what the chat template and the model receive in addition to the conversation."""

    template_kwargs: Mapping[str, Any] | None = None
    """JSON variables of the model's chat template."""
    add_generation_prompt: bool = True
    """False: do not open the assistant's turn."""
    tools: Sequence[Tool] = ()
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Default: ``auto`` if there are tools."""
    parallel_tool_calls: bool = True
    """False: one call at most."""
    include_reasoning: bool = True
    """False: leave the model's reasoning out."""
    mm_processor_kwargs: Mapping[str, float] | None = None
    """Options of the model's processor of images and videos, such as ``max_pixels``; ``fps`` may be a fraction."""


class _Turn(Options, kw_only=True):
    model: str | None = None
    """None: the served model."""


class _Call(_Turn, kw_only=True):
    timeout: float | None = None


class _Chat(ChatOptions, kw_only=True):
    model: str | None = None
    timeout: float | None = None


class TurnArguments(_Turn):
    """Arguments of a session's turn."""

    prompt: Prompt


class PromptArguments(_Call):
    """Arguments of a call with a prompt."""

    prompt: Prompt


class ChatArguments(_Chat):
    """Arguments of a call with a conversation."""

    messages: Sequence[Message]


def takes(
    arguments: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Declare a method's arguments to type checkers; it receives the options as ``**options``, those alone that the
    caller has set."""

    def declare(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        return cast(Callable[Concatenate[S, P], R], method)

    return declare
