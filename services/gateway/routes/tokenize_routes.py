"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.v1 import tokenizer_pb2

from ..adapters.model_names import ModelNames
from ..health import MeshHealth
from ..http.app import Handler
from ..http.exchange import Exchange
from ..http.json_body import BodyParser
from ..http.sse import encode_json
from ..http.time_limit import limited
from ..mesh.tokenizer_client import TokenizerClient
from ..openai.chat_messages import read_chat
from ..openai.openai_models import Body, BodyReader
from ..openapi.request_schemas import DetokenizeRequest, TokenizeRequest
from ..tools.tool_request import read_tools

T = TypeVar("T")


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

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {"/tokenize": {"POST": self.tokenize}, "/detokenize": {"POST": self.detokenize}}

    async def tokenize(self, exchange: Exchange) -> None:
        fields = await self._read(exchange, self._tokenize_request)
        async with limited(self.timeout):
            prompt = await self._encode(fields)
        limits = self.health.limits()
        answer = {
            "count": len(prompt.token_ids),
            "max_model_len": limits.max_model_len if limits else None,
            "tokens": list(prompt.token_ids),
            "token_strs": list(prompt.token_strings) if fields.return_token_strs else None,
        }
        await exchange.respond(200, encode_json(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        token_ids = await self._read(exchange, self._token_ids)
        async with limited(self.timeout):
            text = (await self.tokenizers.decode(token_ids, skip_special_tokens=False)).text
        await exchange.respond(200, encode_json({"prompt": text}))

    async def _encode(self, fields: TokenizeRequest) -> tokenizer_pb2.TokenizedPrompt:
        if (fields.prompt is None) == (fields.messages is None):
            raise errors.InvalidArgument("exactly one of prompt and messages must be set", "prompt")
        strings = bool(fields.return_token_strs)
        if fields.messages is not None:
            if fields.add_special_tokens:
                raise errors.InvalidArgument(
                    "add_special_tokens is not supported for chats: the template adds its own", "add_special_tokens"
                )
            tools = read_tools(fields.tools)
            chat = read_chat(
                fields.messages,
                tools,
                fields.chat_template_kwargs,
                fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
            )
            return (await self.tokenizers.encode_chat(chat, want_token_strings=strings)).prompt
        assert fields.prompt is not None
        encoded = await self.tokenizers.encode(
            [fields.prompt],
            add_special_tokens=fields.add_special_tokens is not False,
            want_token_strings=strings,
        )
        return encoded.prompts[0]

    async def _read(self, exchange: Exchange, read: Callable[[Body], T]) -> T:
        with await exchange.read_body(self.max_body_bytes) as received:
            return await self.parser.read(received.data, read)

    def _tokenize_request(self, body: Body) -> TokenizeRequest:
        self.names.find(body.get("model"))
        return self.reader.read(body, TokenizeRequest)

    def _token_ids(self, body: Body) -> list[int]:
        self.names.find(body.get("model"))
        return narrow_token_ids("tokens", self.reader.read(body, DetokenizeRequest).tokens)
