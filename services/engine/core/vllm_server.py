"""Talks to a running ``vllm serve`` over HTTP: what it says of itself, and token ids in, token ids out."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Meta, Struct

from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreRequest, Logprobs
from tokenloom.request.reasoning import ReasoningStart
from tokenloom.request.sampling_params import sample_seed

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
"""How long an answer about the server itself may take."""
_MAX_ANSWER_BYTES = 16 << 20
_MAX_EVENT_BYTES = 4 << 20
_MAX_REASON = 300
"""Characters of what the server says is wrong with a request."""
_GENERATE = "/inference/v1/generate"
MOST_LOGPROBS = 19
"""The server's own limit, 20, less one: it counts the sampled token, which may be none of the likeliest."""
MOST_TEMPERATURE = 2.0
_UNCHANGED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("skip_reading_prefix_cache", "logit_bias", "allowed_token_ids", "repetition_detection"),
)
"""Parameters that the server takes as they are."""

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class ServerLostError(RuntimeError):
    """The server cannot be reached, its connection broke, or what it sends is not of its contract."""


class ServerRefusedError(RuntimeError):
    """The server answered with an error. ``status``: of HTTP; 200: the error came within a stream."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def advice(refused: ServerRefusedError) -> str:
    """Return what an operator can do so that a server takes token ids."""
    if refused.status in (403, 404):
        return f"vLLM takes no token ids ({refused}): start vllm serve with --enable-scale-out"
    if refused.status == 401:
        return "vLLM wants an API key: put it into a file, and name that by --remote-vllm-key-file"
    return f"vLLM answered with {refused}"


def read_key(file: Path) -> str:
    """Return the API key in a file. Raises ``ValueError`` if it holds none that can be sent."""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--remote-vllm-key-file: {file} cannot be read: {error}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"--remote-vllm-key-file: {file} must hold one key of printable ASCII")
    return key


class TokenLogprob(Struct):
    """Names a token with its natural log probability."""

    token_id: TokenId
    logprob: float
    rank: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None


class PositionLogprobs(TokenLogprob):
    """Holds those of one position: of the sampled token, and of the likeliest ones."""

    top_logprobs: list[TokenLogprob] = []


class ChoiceLogprobs(Struct):
    """Holds those of the new tokens of a choice."""

    content: list[PositionLogprobs] | None = None


class Choice(Struct):
    """Holds new tokens of an output, and why it ended."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None


class _Error(Struct):
    message: str = ""


class _Chunk(Struct):
    choices: list[Choice] = []
    error: _Error | None = None


class _Model(Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class _Models(Struct):
    data: list[_Model] = []


class _Version(Struct):
    # A part of the engine's numerics, whose words are parted by slashes.
    version: Annotated[str, Meta(pattern=r"^[\w.+-]{0,100}$")]


class ServerFacts(NamedTuple):
    """Holds what a server says of itself.

    Attributes:
        model: The name under which requests reach the base model.
        root: The path or hub id that the server loaded; empty: it does not say.
        max_model_len: Tokens of prompt and output together.
        block_size: Tokens of a KV block; 0: it does not say.
        num_blocks: KV blocks; 0: it does not say.
    """

    version: str
    model: str
    root: str
    max_model_len: int
    block_size: int
    num_blocks: int

    def is_of(self, other: "ServerFacts") -> bool:
        """Return whether both may be of one server: of its KV blocks it says nothing while its metrics fail."""
        return self == other._replace(block_size=self.block_size, num_blocks=self.num_blocks)


class VLLMServer:
    """Names one server. Every call has a connection of its own, which ends the request at the server when it closes."""

    def __init__(self, url: str, key: str = "") -> None:
        """``url``: http(s)://host:port, with or without a path before the server's own. ``key``: its API key; empty:
        it asks for none."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._key = key

    async def is_well(self) -> bool:
        """Return whether the server answers, and says that its engine is healthy."""
        try:
            return (await self._answer("GET", "/health"))[0] == 200
        except ServerLostError:
            return False

    async def facts(self) -> ServerFacts:
        """Return what the server says of itself. Raises ``ServerLostError``, and ``ServerRefusedError`` for one that
        wants a key."""
        models = _decoded(_Models, await self._wanted("GET", "/v1/models")).data
        base = next((each for each in models if each.parent is None), None)
        if base is None or base.max_model_len is None:
            raise ServerLostError("its /v1/models names no model with a max_model_len")
        version = _decoded(_Version, await self._wanted("GET", "/version")).version
        _, page = await self._answer("GET", "/metrics")
        return ServerFacts(version, base.id, base.root or "", base.max_model_len, *_kv_blocks(page))

    async def check_generates(self) -> None:
        """Raise ``ServerRefusedError`` unless the server generates from token ids."""
        # It refuses an empty body if it takes any at all.
        status, reason = await self._answer("POST", _GENERATE, b"{}")
        if status not in (400, 422):
            raise ServerRefusedError(status, _reason_of(status, reason))

    async def generate(self, body: bytes) -> AsyncGenerator[Choice, None]:
        """Yield the parts of one output as they come. Close the iterator to end the request. Raises
        ``ServerLostError`` and ``ServerRefusedError``."""
        async with self._asked("POST", _GENERATE, body) as reply:
            if reply.status != 200:
                raise ServerRefusedError(reply.status, _reason_of(reply.status, await reply.whole()))
            async for event in _events(reply):
                if event == b"[DONE]":
                    return
                chunk = _decoded(_Chunk, event)
                if chunk.error is not None:
                    raise ServerRefusedError(200, chunk.error.message[:_MAX_REASON])
                for choice in chunk.choices:
                    yield choice

    async def _wanted(self, method: str, path: str) -> bytes:
        status, body = await self._answer(method, path)
        if status != 200:
            raise ServerRefusedError(status, f"{path}: {_reason_of(status, body)}")
        return body

    async def _answer(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._asked(method, path, body) as reply:
                return reply.status, await reply.whole()
        except TimeoutError:
            raise ServerLostError(f"it did not answer {path} within {ANSWER_SECONDS:g} s") from None

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: bytes) -> AsyncIterator["_Reply"]:
        """Send a request, and yield its answer once that has begun."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._is_secure or None)
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: no host's name
            raise ServerLostError(f"it cannot be reached: {str(error) or 'no answer'}") from None
        try:
            writer.write(self._head(method, path, body) + body)
            await writer.drain()
            reply = _Reply(reader)
            await reply.begin()
            yield reply
        except OSError as error:
            raise ServerLostError(f"its connection broke: {error}") from None
        finally:
            writer.close()

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._netloc}", "connection: close"]
        lines += [f"authorization: Bearer {self._key}"] if self._key else []
        lines += ["content-type: application/json", f"content-length: {len(body)}"] if body else []
        return "\r\n".join((*lines, "", "")).encode()


class _Reply:
    """Reads an answer as it comes."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_begun = self._is_complete = False
        self.status = 0

    async def begin(self) -> None:
        while not self._has_begun:
            await self._read()
        self.status = self._parser.get_status_code()

    async def next(self) -> bytes:
        """Return the next bytes of the body; empty: it is complete."""
        while not self._pieces and not self._is_complete:
            await self._read()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def whole(self) -> bytes:
        """Return the whole body."""
        parts: list[bytes] = []
        while part := await self.next():
            parts.append(part)
            if sum(map(len, parts)) > _MAX_ANSWER_BYTES:
                raise ServerLostError(f"its answer has more than {_MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)

    async def _read(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            raise ServerLostError("its connection ended within an answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ServerLostError(f"its answer is not HTTP: {error}") from None

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


async def _events(reply: _Reply) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, of one line each."""
    rest = b""
    while part := await reply.next():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise ServerLostError(f"an event has more than {_MAX_EVENT_BYTES >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    raise ServerLostError("its answer ended before the last event")


def _decoded(kind: Any, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerLostError(f"it sent what is not of its contract: {error}") from None


def _reason_of(status: int, body: bytes) -> str:
    """Return what an error says, without anything but its message."""
    try:
        found = msgspec.json.decode(body, type=_Chunk).error
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found.message[:_MAX_REASON] if found is not None and found.message else f"status {status}"


def _kv_blocks(page: bytes) -> tuple[int, int]:
    """Return the size and the number of KV blocks that a page of metrics states; 0: it does not."""
    lines = page.decode(errors="replace").splitlines()
    line = next((line for line in lines if line.startswith("vllm:cache_config_info{")), "")
    found = (re.search(rf'[{{,]{name}="(\d{{1,12}})"', line) for name in ("block_size", "num_gpu_blocks"))
    size, number = (0 if each is None else int(each[1]) for each in found)
    return size, number


def lacking(request: EngineCoreRequest, *, may_reason: bool = False) -> str:
    """Return what a request needs that the server does not do, in words; empty: nothing. ``may_reason``: whether the
    model reasons, so that a constraint begins where that ends, unless the prompt has ended it."""
    params, continues = request.sampling_params, bool(request.accepted_token_ids)
    logprobs, constraint = params.logprobs, params.structured_output
    is_constrained = constraint is not None
    may_reason = may_reason and request.reasoning_start != ReasoningStart.CLOSED
    needs = {
        "pooling": request.pooling_params is not None,
        "embeddings in its prompt": request.prompt_embeds,
        "images or sounds": request.media,
        "a LoRA adapter": request.adapter,
        "KV of another engine, or for one": request.lease_id or request.awaits_tokens or request.remote_kv is not None,
        "further inputs": request.resumable,
        "structured outputs after reasoning": is_constrained and may_reason,
        # It takes both and reads neither: of blanks in JSON it knows what it was started with.
        "disable_any_whitespace": constraint is not None and constraint.disable_any_whitespace,
        "whitespace_pattern": constraint is not None and constraint.whitespace_pattern is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "bad_words": params.bad_words,
        "the rules of a transcript": params.transcript is not None,
        "return_routed_experts": params.return_routed_experts,
        "extra_args": params.extra_args,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "logprob_token_ids": params.logprob_token_ids,
        f"more than {MOST_LOGPROBS} logprobs": logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS,
        f"a temperature above {MOST_TEMPERATURE:g}": params.temperature > MOST_TEMPERATURE,
        # The server takes the tokens so far for a part of the prompt, which these leave out.
        "structured outputs after tokens of another engine": continues and is_constrained,
        "presence_penalty over tokens of another engine": continues and params.presence_penalty,
        "frequency_penalty over tokens of another engine": continues and params.frequency_penalty,
        "repetition_detection over tokens of another engine": continues and params.repetition_detection is not None,
    }
    return ", ".join(name for name, is_needed in needs.items() if is_needed)


def generate_body(request: EngineCoreRequest, token_ids: Sequence[int], model: str, max_model_len: int) -> bytes:
    """Return the body that continues a request, of which nothing is lacking, after these output tokens."""
    params, num_output = request.sampling_params, len(token_ids)
    most = min(params.max_tokens - num_output, max_model_len - request.num_prompt_tokens - num_output)
    values = {name: getattr(params, name) for name in _UNCHANGED}
    sampling = {name: value for name, value in values.items() if value is not None}
    sampling |= {
        "max_tokens": most,
        "min_tokens": min(max(params.min_tokens - num_output, 0), most),
        # The edge has added the model's own end tokens, unless the client wants them ignored.
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": True,
        "detokenize": False,
    }
    if params.temperature:
        # The server draws by the seed and the tokens since its own start: with the same one a request that continues
        # would draw its first numbers once more.
        sampling["seed"] = sample_seed(params.seed, num_output) & (2**63 - 1)
    if params.logprobs is not None:
        sampling["logprobs"] = params.logprobs + 1
    if params.structured_output is not None:
        sampling["structured_outputs"] = _constraint(params.structured_output)
    body: dict[str, object] = {
        "model": model,
        "token_ids": [*request.prompt_token_ids, *token_ids],
        "sampling_params": sampling,
        "stream": True,
    }
    if params.structured_output is not None:
        body["reasoning_ended"] = True  # the constraint holds from the first token, whatever parser the server has
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt.hex()
    return msgspec.json.encode(body)


def _constraint(output: StructuredOutput) -> dict[str, object]:
    """Return a constraint as the server's ``structured_outputs``."""
    source: object = output.source
    # The backends of both sides know all of these kinds; what the server's does not know of one, it says.
    if output.kind is GrammarKind.CHOICE:
        source = msgspec.json.decode(output.source)
    elif output.kind is GrammarKind.JSON_OBJECT:
        source = True
    return {output.kind.value: source}


def to_logprobs(positions: Sequence[PositionLogprobs], top: int, vocab_size: int) -> Logprobs:
    """Return the columns of some positions with ``top`` alternatives each. Raises ``ServerLostError`` for positions
    that have fewer, or tokens that the model does not have."""
    columns = Logprobs([], [], top)
    for each in positions:
        # The sampled token comes first, whatever its rank.
        ranked = sorted(each.top_logprobs, key=lambda one: one.rank or vocab_size)[:top]
        if len(ranked) < top or any(one.token_id >= vocab_size for one in ranked):
            raise ServerLostError("it sent other log probabilities than were asked for")
        columns.sampled.append(each.logprob)
        columns.rank.append(each.rank or vocab_size)
        columns.token_ids += [one.token_id for one in ranked]
        columns.logprobs += [one.logprob for one in ranked]
    return columns
