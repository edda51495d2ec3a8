"""``/v1/messages/count_tokens``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

from ..encoding.sse import encode_json
from ..formats.tool_request import read_tools
from ..generation.generator import Generator
from ..http.http_exchange import HttpExchange
from ..http.request_body import BodyParser
from ..mesh.tokenizer_client import limited
from ..openai.body_reader import Body, BodyReader
from ..openai.chat import read_chat
from ..openapi.request_schemas import CountTokensRequest
from ..records.generate_request import Chat
from ..records.model_names import ModelNames
from ..records.volatile_lines import AGENTS, VolatileLine, lines_of, settled
from .context_edits import ContextEdits, read_edits
from .messages_body import conversation, thinking_of

if TYPE_CHECKING:
    from ..http.body_files import BodyFiles


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Counts the tokens of a conversation as the chat template writes it."""

    parser: BodyParser
    reader: BodyReader
    generator: Generator
    names: ModelNames
    max_body_bytes: int
    timeout: float
    """Seconds that a call may take."""
    volatile: Sequence[VolatileLine] | None = ()
    """As in :class:`.GenerationEndpoint`: what is counted is what ``/v1/messages`` would be given."""
    files: "BodyFiles | None" = None
    """As there, too."""

    async def __call__(self, exchange: HttpExchange) -> None:
        with await exchange.read_body(self.max_body_bytes, self.files) as received:
            lines, agent = self.volatile, exchange.headers.get(b"user-agent", b"")
            if lines is not None and agent.startswith(AGENTS):
                lines = lines_of(agent, lines)
            chat, edits = await self.parser.read(received.data, partial(self._chat, lines))

        async def encode(chat: Chat) -> TokenizedPrompt:
            return await self.generator.tokenize(chat, exchange.tenant, exchange.body.files)

        async with limited(self.timeout):
            prompt = await encode(chat) if edits is None else (await edits.run(chat, encode))[1]
        before = {} if edits is None else {"context_management": {"original_input_tokens": edits.num_tokens}}
        await exchange.respond(200, encode_json({"input_tokens": num_ids(prompt)} | before))

    def _chat(self, lines: Sequence[VolatileLine] | None, body: Body) -> tuple[Chat, ContextEdits | None]:
        self.names.find(body.get("model"))
        if lines:
            body, _ = settled(body, lines)
        fields = self.reader.read(body, CountTokensRequest)
        chat, reasoning = conversation(fields), thinking_of(fields.thinking)
        read = read_chat(
            chat["messages"],
            read_tools(chat.get("tools")),
            reasoning.get("chat_template_kwargs"),
            continue_final_message=chat.get("continue_final_message"),
        )
        return read, read_edits(fields.context_management)
