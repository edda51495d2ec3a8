"""What a client asks for, independent of the API that it uses."""

import base64
import binascii
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tokenloom.request.errors import InvalidArgument, TokenloomError
from tokenloom.request.prompt_embeds import FIELD, Part
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2

from ..tenants.tenant import Tenant
from .model_names import NamedAdapter

if TYPE_CHECKING:  # most requests have no files
    from .media import HeldFiles, MediaPart

SHEDDABLE_PRIORITY: Final = 1 << 20
"""Priority of a sheddable request, where engines take priorities: less urgent than what a client usually asks for."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, as the tokenizer's template takes it."""

    messages_json: bytes
    tools_json: bytes = b""
    template_kwargs_json: bytes = b""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """End within the last turn, so that the model continues it."""
    has_answers: bool = False
    """Whether a turn of it is the assistant's."""
    media: "Sequence[MediaPart]" = ()
    """Its images, in the order of their parts in the messages."""
    media_options: bytes = b""
    """The client's options of the image processor, as canonical JSON; empty: it sets none."""
    token_ids: Sequence[int] = ()
    """The tokens that a tokenizer has rendered before, in which only ``media`` are placed; empty: render the turns."""
    places: Sequence[tuple[int, int]] = ()
    """For each of ``media`` of such tokens, where the client says that it stands: the first token and how many; empty:
    it does not say."""


Encode = Callable[[Chat], Awaitable[tokenizer_pb2.TokenizedPrompt]]
"""Renders a conversation and returns its tokens."""


class RestorableMedia(Protocol):
    """Puts the files of a request at encoders."""

    async def restore(self, submit: output_processor_pb2.Submit) -> None:
        """Put them again, and write into the request where they are now."""

    def name(self, error: TokenloomError) -> None:
        """Name the client's field in an error of one of them."""


class PromptEdits(Protocol):
    """Describes what shortens a conversation, once the number of its tokens is known."""

    async def run(self, chat: Chat, encode: Encode) -> tuple[Chat, tokenizer_pb2.TokenizedPrompt]:
        """Return the conversation that the model is to see, and its tokens."""


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """Token ids and safetensors files, in order. Their contents are checked later, against the model's limits."""

    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class SoundPrompt:
    """The prompt of a piece of a sound, which a tokenizer has written already."""

    prompt: tokenizer_pb2.TokenizedPrompt
    sound: RestorableMedia

    def __len__(self) -> int:
        return len(self.prompt.token_ids)


Prompts: TypeAlias = Chat | Sequence[str | Sequence[object] | EmbeddedPrompt | SoundPrompt]
"""A conversation, texts, lists of what should be token ids, or prompts with embeddings or beside a sound."""


def sound_of(prompts: Prompts) -> RestorableMedia | None:
    """Return the sound of a request; None: it has none."""
    if isinstance(prompts, Chat) or len(prompts) != 1 or not isinstance(prompts[0], SoundPrompt):
        return None
    return prompts[0].sound


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search for the likeliest outputs instead of sampling."""

    length_penalty: float = 1.0
    """Exponent of the length by which scores are divided."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request whose form has been checked, but not yet its values against the model's limits."""

    prompts: Prompts
    prompt_field: str
    """The client's name for them, for errors."""
    sampling: types_pb2.SamplingParams
    """Only what the client set."""
    text: output_processor_pb2.TextOptions = field(default_factory=output_processor_pb2.TextOptions)
    tenant: Tenant = field(kw_only=True)
    """Of the client's key; without a default, so that no entrance forgets it."""
    ignore_eos: bool = False
    priority: int = 0
    """The client's; a lower one runs first. The gateway may raise it."""
    is_sheddable: bool = False
    """Run it only with capacity that no other request needs: it is refused first, and runs after all others."""
    num_samples: int = 1
    """Outputs of each prompt."""
    beam_search: BeamOptions | None = None
    """Search with ``num_samples`` beams; None: sample."""
    bad_words: Sequence[str] = ()
    """Texts that must not appear in the output."""
    most_tokens: int = 0
    """Limit of an output for which ``sampling`` has none; what the prompt leaves of the context may be less. 0: the
    model's default."""
    fills_context: bool = False
    """Whether an output without any limit may take all that the prompt leaves, as that of a chat."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of a prompt; -1: as many as leave room for the answer."""
    add_special_tokens: bool = True
    """For texts; a chat's template adds its own."""
    echo: bool = False
    """Return the prompt's text too."""
    reasoning_start: types_pb2.ReasoningStart = types_pb2.REASONING_START_UNSPECIFIED
    """How prompts of token ids leave the reasoning, if the client knows it."""
    before: Sequence[int] = ()
    """Tokens that a single prompt continues: the earlier turns of a session."""
    timeout: float | None = None
    """Seconds; None: the gateway's default."""
    own_salt: str = ""
    """The client's own salt: cached prefixes are shared only with requests that have it too."""
    kv: output_processor_pb2.KVHandover | None = None
    """Which half of it runs, for a peer that joins prefill and decode itself; None: all of it."""
    adapter: NamedAdapter | None = None
    """The LoRA adapter that generates; None: the model itself."""
    data_parallel_rank: int | None = None
    """The rank of a data-parallel group that must run it; None: any."""
    session: str = ""
    """The client's name for the session of which it is a turn, a hint for placement and caches; empty: it gives
    none."""
    ttft_deadline: float | None = None
    """Seconds from the request's arrival in which its first token must come; it is refused at once unless that can be
    promised. None: it has no such deadline."""
    keep_seconds: int = 0
    """For how long the client wants the prompt kept in the cache; 0: it does not say. A hint for caches."""
    edits: PromptEdits | None = None
    """Shortens a conversation; None: the model sees all of it."""
    answer: str = ""
    """The name by which the client may compare a later turn with this one; empty: the request's id."""
    compared: str | None = None
    """The name of the answer of the turn with which the client compares this one; empty: it compares none, and may
    compare a later turn with this one."""
    files: "HeldFiles | None" = None
    """Files of the request's body; None: it has none, or small ones, which are in the parts."""
    is_continued: bool = False
    """Whether it belongs to a call that the admission holds, and so may begin while the gateway drains."""
    keeps_files: bool = False
    """Whether later requests of the tenant may name its images by digest, because its conversation is stored."""


SESSION_HEADERS: Final = frozenset(
    {b"x-session-id", b"session_id", b"session-id", b"x-claude-code-session-id", b"x-session-affinity"}
)
"""Name the session of a request: as routers have it, twice as Codex, as Claude Code and as OpenCode."""


def session_of_headers(headers: Mapping[bytes, bytes]) -> str:
    """Return the session that headers, whose names are in lower case, give a request; empty: they name none."""
    return next((value.decode("latin-1") for name, value in headers.items() if name in SESSION_HEADERS and value), "")


def session_digest(request: GenerateRequest) -> int:
    """Return the number that stands for a request's session within the mesh. No other tenant's session has it."""
    tenant = hashlib.blake2b(request.tenant.name.encode()).digest()
    digest = hashlib.blake2b(request.session.encode(), key=tenant, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def read_embeds_prompts(value: object) -> list[EmbeddedPrompt]:
    """Return the prompts of ``prompt_embeds``: one prompt, or a list of prompts. Raises ``InvalidArgument``.

    A prompt is the base64 of a safetensors file, or a list of parts, ``{"token_ids": […]}`` and ``{"embeds": base64}``.
    """
    if isinstance(value, str):
        return [EmbeddedPrompt([_decode(value)])]
    if not isinstance(value, list) or not value:
        raise InvalidArgument(f"{FIELD} must be base64, or a list of prompts that have embeddings", FIELD)
    if all(isinstance(item, Mapping) for item in value):
        return [_read_parts(value)]
    return [EmbeddedPrompt([_decode(item)]) if isinstance(item, str) else _read_parts(item) for item in value]


def _read_parts(value: object) -> EmbeddedPrompt:
    if not isinstance(value, list) or not value:
        raise InvalidArgument(f"{FIELD}: a prompt must be base64 or a list of parts", FIELD)
    return EmbeddedPrompt([_read_part(part) for part in value])


def _read_part(part: object) -> Part:
    if isinstance(part, Mapping) and len(part) == 1:
        if isinstance(token_ids := part.get("token_ids"), list):
            return token_ids
        if "embeds" in part:
            return _decode(part["embeds"])
    raise InvalidArgument(f'{FIELD}: a part must be {{"token_ids": [...]}} or {{"embeds": base64}}', FIELD)


def _decode(text: object) -> bytes:
    if not isinstance(text, str):
        raise InvalidArgument(f"{FIELD} must be the base64 of a safetensors file", FIELD)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{FIELD} is not base64", FIELD) from None
