"""Reads the forms in which the offline API accepts prompts, and renders conversations to prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypedDict, TypeVar

import torch
from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.request.chat_template import past_arguments, read_chat_template
from tokenloom.request.errors import TokenloomError
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.reasoning import ReasoningStart
from tokenloom.services.tokenizer.chat_template import ChatTemplate, MaskingTemplate
from tokenloom.services.tokenizer.output_format import PARSED_MARKS, control_tokens
from tokenloom.services.tokenizer.spelled_tokens import PlainTextEncoder, Rendered, TokenFinder, unmasked
from tokenloom.services.tokenizer.template_probe import probe_forms
from tokenloom.v1 import types_pb2

from .media import MARKS, GivenMedia, OfflineMedia, PromptMedia, media_of, take_media


class TextPrompt(TypedDict, total=False):
    """A text: ``{"prompt": …}``, with the images or sounds that its marks stand for in ``multi_modal_data``. Options of
    their processor are in ``mm_processor_kwargs``."""

    prompt: str
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """Token ids: ``{"prompt_token_ids": …}``, with their text if it is known."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """Embeddings: ``{"prompt_embeds": …}``, a tensor [n, hidden_size] or a list of tensors and lists of token ids."""

    prompt_embeds: Any
    cache_salt: str


Prompt: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]
Message: TypeAlias = Mapping[str, Any]
"""A turn of a chat in OpenAI's form."""

T = TypeVar("T")

_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt of any form as token ids."""

    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""
    embeds: Sequence[types_pb2.PromptEmbeds] = ()
    media: PromptMedia | None = None
    """None: it has none."""
    adapter: bytes = b""
    """The digest of its LoRA adapter; empty: the base model."""
    reasoning_start: ReasoningStart = ReasoningStart.BY_MARKS
    skipped_tokens: int = 0
    """So many tokens at its begin take no part in a vector."""
    error: ValueError | None = None
    """Why it cannot be read; then it has no tokens."""

    def then(self, token_ids: Sequence[int]) -> "TokenizedPrompt":
        """Return the prompt followed by more tokens."""
        return replace(self, text=None, token_ids=[*self.token_ids, *token_ids])


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A list of token ids is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and all(isinstance(item, int) for item in several) else several


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Return one conversation or several as a list."""
    turns: list[Any] = list(messages)
    return [turns] if turns and isinstance(turns[0], Mapping) else [list(conversation) for conversation in turns]


def read_each(prompts: Iterable[T], read: Callable[[T], TokenizedPrompt]) -> list[TokenizedPrompt]:
    """Return what ``read`` returns for each of several prompts; one that it refuses has its error, so that the others
    run."""

    def read_or_refuse(prompt: T) -> TokenizedPrompt:
        try:
            return read(prompt)
        except ValueError as error:
            return TokenizedPrompt(None, [], error=error)
        except TokenloomError as error:
            return TokenizedPrompt(None, [], error=ValueError(error.message))

    return list(map(read_or_refuse, prompts))


def read_prompt(prompt: object, tokenizer: Tokenizer, media: OfflineMedia | None = None) -> TokenizedPrompt:
    """Encode a prompt unless it holds token ids, or is encoded. ``media``: reads that of prompts; None: they have none.

    Raises ``ValueError`` or ``InvalidArgument`` for any other form.
    """
    if isinstance(prompt, TokenizedPrompt):
        return prompt
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(whole_text("the prompt", prompt)).ids)
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, tokenizer, media)
    return TokenizedPrompt(None, narrow_token_ids("prompt", prompt))


def _read_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer, media: OfflineMedia | None) -> TokenizedPrompt:
    for key in prompt:
        if key not in _KEYS:
            raise ValueError(f"prompt: {key!r} is not supported; expected {', '.join(_KEYS)}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key} must be a string, not {type(value).__name__}")
        whole_text("the prompt" if key == "prompt" else key, value or "")
    options = prompt.get("mm_processor_kwargs")
    if (data := prompt.get("multi_modal_data")) and (given := media_of(data)):
        if media is not None and (sound := media.beside(given, salt.encode())) is not None:
            if options:
                raise ValueError("mm_processor_kwargs: the processor of this model has no options")
            return TokenizedPrompt(text, _ids_beside(text, token_ids, tokenizer), salt.encode(), media=sound)
        if media is None or text is None or len(prompt.keys() - {"cache_salt", "mm_processor_kwargs"}) > 2:
            raise ValueError("multi_modal_data needs a prompt of text with the model's mark for each image or sound")
        return _with_media(text, given, salt.encode(), tokenizer, media, options)
    if options:
        raise ValueError("mm_processor_kwargs needs images or videos in multi_modal_data")
    if (embeds := prompt.get("prompt_embeds")) is not None:
        if text is not None or token_ids is not None:
            raise ValueError(
                "prompt_embeds cannot be combined with prompt or prompt_token_ids; it may hold lists of token ids"
            )
        return replace(_join(embeds if isinstance(embeds, list) else [embeds]), cache_salt=salt.encode())
    if token_ids is None:
        if text is None:
            raise ValueError("a prompt needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'")
        return TokenizedPrompt(text, tokenizer.encode(text).ids, salt.encode())
    return TokenizedPrompt(text, narrow_token_ids("prompt_token_ids", token_ids), salt.encode())


def _ids_beside(text: str | None, token_ids: object, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt with a sound beside it. Raises ``ValueError``."""
    if (text is None) == (token_ids is None):
        raise ValueError("a prompt with a sound beside it needs either 'prompt' or 'prompt_token_ids'")
    if text is None:
        return narrow_token_ids("prompt_token_ids", token_ids)
    # Its special tokens are spelled: the tokenizer's own would begin a second transcript.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _with_media(
    text: str,
    given: Sequence[GivenMedia],
    salt: bytes,
    tokenizer: Tokenizer,
    media: OfflineMedia,
    options: Mapping[str, Any] | None,
) -> TokenizedPrompt:
    rendered, expanded = media.expand(Rendered(text), given, salt, options)
    ids = tokenizer.encode(rendered.text).ids
    media.place(expanded, ids)
    return TokenizedPrompt(text, ids, salt, media=expanded)


def _join(parts: Sequence[object]) -> TokenizedPrompt:
    """Join tensors and lists of token ids into one prompt; rows of tensors have token id 0."""
    token_ids: list[int] = []
    embeds = []
    for part in parts:
        if isinstance(part, list):
            token_ids += narrow_token_ids("prompt_embeds", part)
            continue
        rows = _as_rows(part)
        data = rows.contiguous().numpy().tobytes()
        embeds.append(types_pb2.PromptEmbeds(position=len(token_ids), num_tokens=len(rows), rows=data))
        token_ids += [0] * len(rows)
    return TokenizedPrompt(None, token_ids, embeds=embeds)


def _as_rows(part: object) -> torch.Tensor:
    """Return a tensor of the caller in float32 on the CPU. Raises ``ValueError``."""
    wanted = "prompt_embeds must be a float tensor [n, hidden_size]"
    try:
        rows = torch.as_tensor(part)
        if rows.dim() != 2 or not rows.is_floating_point():
            raise ValueError(f"{wanted}, not {list(rows.shape)} {rows.dtype}")
        return rows.detach().to("cpu", torch.float32)
    except (TypeError, RuntimeError) as error:  # no numbers at all, or a tensor without data
        raise ValueError(f"{wanted}, not {type(part).__name__}: {error}") from None


def plain_message(message: Message) -> dict[str, Any]:
    """Return a turn for chat templates, with parts of text joined by line breaks (vLLM), and arguments of past calls as
    objects. Raises ``ValueError``."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("each message must be a mapping with a role")
    content, turn = message.get("content"), dict(message)
    if message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if "reasoning" in turn:  # vLLM's newer name; templates use the older one
        turn.setdefault("reasoning_content", turn.pop("reasoning"))
    if content is None or isinstance(content, str):
        return turn
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"content must be a string or a list of parts of type text, not {type(content).__name__}")
    marks = MARKS.values()  # as ``take_media`` leaves them
    if any(part in marks for part in content):  # the template puts each part in its place
        parts = [part if part in marks else {"type": "text", "text": _part(part)} for part in content]
        return {**turn, "content": parts}
    return {**turn, "content": "\n".join(_part(part) for part in content)}


def _call(call: Any) -> Any:
    """Return a past call with its arguments as templates take them."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": past_arguments(function.get("arguments"))}}


def whole_text(name: str, text: str) -> str:
    """Return the text. Raises ``ValueError`` if it holds half a surrogate pair, which no tokenizer and no message of
    the services takes; JSON's escapes can write one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a surrogate pair, not a character, at index {error.start}") from None
    return text


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError("content must be a string, or a list of parts of type text, image_url, video_url or audio_url")
    return str(part["text"])


class ChatPrompts:
    """Renders conversations with the checkpoint's chat template, or with another one."""

    def __init__(
        self, info: CheckpointInfo, tokenizer: Tokenizer, model_name: str, media: OfflineMedia | None = None
    ) -> None:
        """``media``: reads that of conversations; None: they have none."""
        self._info = info
        self._media = media
        self._tokenizer = tokenizer
        self._model_name = model_name

    def encode(
        self,
        conversations: Sequence[Sequence[Message]],
        source: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: Mapping[str, Any] | None = None,
        **options: bool,
    ) -> list[TokenizedPrompt]:
        """Return each conversation's prompt, as :func:`read_each` does. ``source``: another template, or its file.
        ``processor``: options of the processor of images and videos.

        Special tokens that its texts spell out are plain text.

        Raises ``ValueError`` without any template, ``InvalidArgument`` for a file that cannot be read.
        """
        template = self._template(source)
        marks = [] if self._media is None else self._media.marks
        controls = TokenFinder([*control_tokens(self._tokenizer, template.source), *marks])
        masking = MaskingTemplate(template, controls, PARSED_MARKS)

        def encode(messages: Sequence[Message]) -> TokenizedPrompt:
            given = list[GivenMedia]()
            turns = [plain_message(take_media(message, given)) for message in messages]
            rendered = masking.render(turns, tools, template_kwargs, None, **options)
            whole_text("the conversation", rendered.text)
            if not given:
                return self._encode(rendered)
            if self._media is None:
                raise ValueError("this model reads text only")
            rendered, expanded = self._media.expand(rendered, given, options=processor)
            prompt = self._encode(rendered)
            self._media.place(expanded, prompt.token_ids)
            return replace(prompt, media=expanded)

        return read_each(conversations, encode)

    def _encode(self, rendered: Rendered) -> TokenizedPrompt:
        text, start = unmasked(rendered.text, rendered.masks), ReasoningStart[rendered.reasoning_start]
        if rendered.masks:
            ids, _ = self._plain_texts.encode(rendered)
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids  # the template writes the special tokens
        return TokenizedPrompt(text, ids, reasoning_start=start)

    def _template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return _probed(ChatTemplate(read_chat_template(source), self._info.special_tokens))
        if self._own_template is None:
            raise ValueError(f"model {self._model_name!r} has no chat template: give one as chat_template")
        return self._own_template

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        template = ChatTemplate.from_checkpoint(self._info)
        return None if template is None else _probed(template)

    @cached_property
    def _plain_texts(self) -> PlainTextEncoder:
        return PlainTextEncoder(self._tokenizer)


def _probed(template: ChatTemplate) -> ChatTemplate:
    template.forms = probe_forms(template)
    return template
