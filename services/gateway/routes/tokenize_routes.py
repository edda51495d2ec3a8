"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.packed_ids import ids_of
from tokenloom.v1 import tokenizer_pb2

from ..encoding.sse import encode_json
from ..formats.tool_request import read_tools
from ..generation.generator import Generator
from ..http.http_exchange import IGNORED_HEADER, HttpExchange, listed, respond_in_pieces
from ..http.request_body import BodyParser
from ..http.route import Routes
from ..mesh.tokenizer_client import TokenizerClient, limited
from ..openai.body_reader import Body, BodyReader
from ..openai.chat import read_chat
from ..openapi import route_table
from ..openapi.request_schemas import DetokenizeRequest, TokenizeRequest
from ..records.generate_request import Chat
from ..records.model_names import ModelNames
from ..serving.mesh_health import MeshHealth

if TYPE_CHECKING:
    from ..http.body_files import BodyFiles

T = TypeVar("T")

VALUES_PER_BLOCK = 1 << 11
"""Ids, or strings of tokens, that become JSON at once: 0.1 ms."""

_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields that have no effect on a text."""


@dataclass(frozen=True, slots=True)
class _ToEncode:
    """A checked body of ``/tokenize``."""

    what: str | Chat
    add_special_tokens: bool
    want_token_strings: bool
    ignored: Sequence[str]
    """Names of fields that have no effect."""


@dataclass(frozen=True, slots=True)
class TokenizeRoutes:
    """Turns text into token ids as for requests, and back."""

    parser: BodyParser
    reader: BodyReader
    tokenizers: TokenizerClient
    health: MeshHealth
    names: ModelNames
    max_body_bytes: int
    timeout: float
    """Seconds that a call may take."""
    generator: Generator
    files: "BodyFiles | None" = None
    """Takes the files out of large bodies; None: the model reads text only."""

    def routes(self) -> Routes:
        return {route_table.TOKENIZE: self.tokenize, route_table.DETOKENIZE: self.detokenize}

    async def tokenize(self, exchange: HttpExchange) -> None:
        request = await self._read(exchange, self._tokenize_request)
        async with limited(self.timeout):
            prompt = await self._encode(request, exchange)
        limits = self.health.limits()
        strings = prompt.token_strings if request.want_token_strings else None
        blocks = _answer(prompt, limits.max_model_len if limits else None, strings)
        headers = [(IGNORED_HEADER, listed(request.ignored))] if request.ignored else []
        await respond_in_pieces(exchange, blocks, headers)

    async def detokenize(self, exchange: HttpExchange) -> None:
        token_ids = await self._read(exchange, self._token_ids)
        async with limited(self.timeout):
            decoding = self.tokenizers.decode(token_ids, skip_special_tokens=False, tenant=exchange.tenant.name)
            text = (await decoding).text
        await exchange.respond(200, encode_json({"prompt": text}))

    async def _encode(self, request: _ToEncode, exchange: HttpExchange) -> tokenizer_pb2.TokenizedPrompt:
        if isinstance(request.what, Chat):
            return await self.generator.tokenize(
                request.what,
                exchange.tenant,
                exchange.body.files,
                want_token_strings=request.want_token_strings,
            )
        encoded = await self.tokenizers.encode(
            [request.what],
            add_special_tokens=request.add_special_tokens,
            want_token_strings=request.want_token_strings,
            takes_packed_ids=True,
            tenant=exchange.tenant.name,
        )
        return encoded.prompts[0]

    async def _read(self, exchange: HttpExchange, read: Callable[[Body], T]) -> T:
        with await exchange.read_body(self.max_body_bytes, self.files) as received:
            return await self.parser.read(received.data, read)

    def _tokenize_request(self, body: Body) -> _ToEncode:
        self.names.find(body.get("model"))
        fields = self.reader.read(body, TokenizeRequest)
        ignored = self.reader.ignored(body, TokenizeRequest)
        what, without_effect = _what(fields)
        return _ToEncode(
            what,
            add_special_tokens=fields.add_special_tokens is not False,
            want_token_strings=bool(fields.return_token_strs),
            ignored=(*without_effect, *ignored),
        )

    def _token_ids(self, body: Body) -> list[int]:
        self.names.find(body.get("model"))
        return narrow_token_ids("tokens", self.reader.read(body, DetokenizeRequest).tokens)


def _answer(
    prompt: tokenizer_pb2.TokenizedPrompt, max_model_len: int | None, strings: Sequence[str] | None
) -> Iterator[bytes]:
    """Yield the answer's JSON in blocks: millions of ids in one kept the event loop busy for 0.1 s."""
    token_ids = ids_of(prompt)
    yield b'{"count":%d,"max_model_len":%b,"tokens":' % (len(token_ids), encode_json(max_model_len))
    yield from _array(token_ids)
    yield b',"token_strs":'
    yield from [b"null"] if strings is None else _array(strings)
    yield b',"plain_text_tokens":%b}' % encode_json(list(prompt.plain_text_tokens))


def _array(values: Sequence[int] | Sequence[str]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(values), VALUES_PER_BLOCK):
        yield b"," * bool(start) + encode_json(list(values[start : start + VALUES_PER_BLOCK]))[1:-1]
    yield b"]"


def _what(fields: TokenizeRequest) -> tuple[str | Chat, Sequence[str]]:
    """Return the text or the conversation to encode, and the fields that have no effect on it."""
    tools = read_tools(fields.tools)  # wrong ones are refused with a text too
    if fields.prompt is not None and fields.messages is None:
        return fields.prompt, [name for name in _OF_CHATS if getattr(fields, name) is not None]
    if fields.messages is None or fields.prompt is not None:
        raise errors.InvalidArgument("exactly one of prompt and messages must be set", "prompt")
    if fields.add_special_tokens:
        raise errors.InvalidArgument(
            "add_special_tokens is not supported for chats: the template adds its own", "add_special_tokens"
        )
    chat = read_chat(
        fields.messages,
        tools,
        fields.chat_template_kwargs,
        fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
    )
    return chat, ()
