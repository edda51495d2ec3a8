"""Calls every entrance of a gateway by which a client makes a mesh compute."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from tests.mesh.harness import MODEL, SOON
from tests.ready_channel import ready_channel
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc
from tokenloom.v1.vllm import vllm_engine_pb2 as vllm_pb
from tokenloom.v1.vllm import vllm_engine_pb2_grpc

from .client import FIXED, Client, Refused

PROMPT = "A lantern on the bridge."
PROMPT_IDS: list[int] = load_tokenizer(DEMO_MODEL).encode(PROMPT).ids
NUM_PROMPT_TOKENS = len(PROMPT_IDS)
MAX_TOKENS = 6
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Reply:
    """How a call ended.

    Attributes:
        error: HTTP's status or the name of gRPC's code; empty if the call was answered.
        tokens: Prompt and output tokens, by the answer's own usage.
    """

    error: str = ""
    tokens: int = 0


Call = Callable[[Client], Awaitable[int]]
"""Makes a call and returns its tokens. Raises ``Refused``."""


async def outcome(call: Call, client: Client) -> Reply:
    """Return how a call ended."""
    try:
        async with asyncio.timeout(SOON):
            return Reply(tokens=await call(client))
    except Refused as refusal:
        return Reply(error=str(refusal.args[0]))
    except grpc.aio.AioRpcError as error:
        return Reply(error=error.code().name)


def _posts(path: str, **body: Any) -> Call:
    """Return a call of an API that gives its usage as OpenAI's, Anthropic's or Ollama's does."""

    async def call(client: Client) -> int:
        answer = await client.post(path, {"model": MODEL, **body})
        usage = answer.get("usage") or answer
        names = ("total_tokens",), ("input_tokens", "output_tokens"), ("prompt_eval_count", "eval_count")
        for group in names:
            if group[0] in usage:
                return sum(int(usage.get(name, 0)) for name in group)
        raise AssertionError(f"{path} gives no usage: {answer}")

    return call


async def _ollamas_older_vector(client: Client) -> int:
    """Its answer has no usage: it takes as many tokens as the newer form."""
    answer = await client.post("/api/embeddings", {"model": MODEL, "prompt": PROMPT})
    assert answer["embedding"]
    return NUM_PROMPT_TOKENS


async def _in_background(client: Client) -> int:
    created = await client.post("/v1/responses", {**_responses(), "background": True})
    async with asyncio.timeout(SOON), client.http() as http:
        found = created
        while found["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            found = (await http.get(f"/v1/responses/{created['id']}")).json()
    if found["status"] == "failed":
        raise Refused(found["error"]["code"])
    return int(found["usage"]["total_tokens"])


def _responses() -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "input": PROMPT, "max_output_tokens": MAX_TOKENS}


async def _as_a_line(client: Client) -> int:
    """Send one line as a batch. A line that is refused for a limit is sent again until the batch ends."""
    body = {**FIXED, "prompt": PROMPT, "max_tokens": MAX_TOKENS}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    async with client.http() as http:
        upload = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", line)})
        if upload.status_code != 200:
            raise Refused(str(upload.status_code))
        asked = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=asked)).json()
        try:
            while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
                await asyncio.sleep(0.01)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        except BaseException:
            await http.post(f"/v1/batches/{batch['id']}/cancel")
            raise
        if (errors := batch.get("error_file_id")) is not None:
            failed = json.loads((await http.get(f"/v1/files/{errors}/content")).text)
            raise Refused(str(failed["response"]["status_code"]))
        found = json.loads((await http.get(f"/v1/files/{batch['output_file_id']}/content")).text)
    return int(found["response"]["body"]["usage"]["total_tokens"])


def generate_request(max_tokens: int = MAX_TOKENS) -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return pb.GenerateRequest(model=MODEL, text=PROMPT, sampling_params=sampling, ignore_eos=True)


@asynccontextmanager
async def inference(client: Client) -> AsyncIterator["inference_pb2_grpc.InferenceAsyncStub"]:
    async with ready_channel(client.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def _used(call: Any) -> int:
    tokens = 0
    async for response in call:
        if response.HasField("usage"):
            tokens += response.usage.prompt_tokens + response.usage.completion_tokens
    return tokens


async def _generated(client: Client) -> int:
    async with inference(client) as stub:
        return await _used(stub.Generate(generate_request(), metadata=client.metadata))


class Way:
    """A way to continue a request after the connection is lost."""

    async def begin(self, client: Client, max_tokens: int) -> str:
        """Begin a request, lose the connection after its first token, and return what names the request."""
        raise NotImplementedError

    async def go_on(self, client: Client, name: str, max_tokens: int) -> int:
        """Receive the whole answer and return its tokens. Raises as a :data:`Call`."""
        raise NotImplementedError


class ByCall(Way):
    async def begin(self, client: Client, max_tokens: int) -> str:
        async with inference(client) as stub:
            call = stub.Generate(self._request(max_tokens), metadata=client.metadata)
            return str((await anext(aiter(call))).request_id)

    async def go_on(self, client: Client, name: str, max_tokens: int) -> int:
        asked = pb.InferenceResumeRequest(request=self._request(max_tokens), request_id=name)
        async with inference(client) as stub:
            return await _used(stub.Resume(asked, metadata=client.metadata))

    def _request(self, max_tokens: int) -> pb.GenerateRequest:
        request = generate_request(max_tokens)
        request.resumable = True
        return request


class ByHeader(Way):
    """``header``: by which the request is continued."""

    def __init__(self, header: str) -> None:
        self.header = header

    async def begin(self, client: Client, max_tokens: int) -> str:
        name = "0" if self.header == "last-event-id" else os.urandom(8).hex()
        async with self._stream(client, name, max_tokens) as lines:
            async for line in lines:
                if line.startswith("id: ") and self.header == "last-event-id":
                    return f"{line[4:].partition('.')[0]}.1."
                if line.startswith("data: ") and self.header != "last-event-id":
                    return name
        raise AssertionError("the answer is empty")

    async def go_on(self, client: Client, name: str, max_tokens: int) -> int:
        used = 0
        async with self._stream(client, name, max_tokens) as lines:
            async for line in lines:
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                if "error" in event:
                    raise Refused(str(event["error"]["code"]))
                used = (event.get("usage") or {}).get("total_tokens", used)
        return int(used)

    @asynccontextmanager
    async def _stream(self, client: Client, name: str, max_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        body = {**FIXED, "prompt": PROMPT, "max_tokens": max_tokens, "seed": 1, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        headers = {self.header: name}
        async with (
            client.http() as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise Refused(str(response.status_code))
            lines = response.aiter_lines()
            yield lines
            await lines.aclose()  # type: ignore[attr-defined]


async def _a_session(client: Client) -> int:
    async with inference(client) as stub:
        return await _used(stub.GenerateSession(iter([generate_request()]), metadata=client.metadata))


def _pools(rpc: str, request: Message) -> Call:
    async def call(client: Client) -> int:
        async with inference(client) as stub:
            return await _used(getattr(stub, rpc)(request, metadata=client.metadata))

    return call


def infer_request(*, stream: bool = False) -> kserve_pb.ModelInferRequest:
    request = kserve_pb.ModelInferRequest(model_name=MODEL)
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(PROMPT.encode())
    if stream:
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = MAX_TOKENS
    return request


@asynccontextmanager
async def kserve(client: Client) -> AsyncIterator[Any]:
    async with ready_channel(client.address) as channel:
        yield grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _kserve_tokens(response: kserve_pb.ModelInferResponse) -> int:
    found = response.parameters
    return sum(found[name].int64_param for name in ("prompt_tokens", "completion_tokens") if name in found)


async def _inferred(client: Client) -> int:
    async with kserve(client) as stub:
        return _kserve_tokens(await stub.ModelInfer(infer_request(), metadata=client.metadata))


async def _inferred_in_a_stream(client: Client) -> int:
    tokens = 0
    async with kserve(client) as stub:
        async for response in stub.ModelStreamInfer(iter([infer_request(stream=True)]), metadata=client.metadata):
            if response.error_message:
                raise Refused(response.error_message)
            tokens += _kserve_tokens(response.infer_response)
    return tokens


async def _tokens_for_tokens(client: Client) -> int:
    request = vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=PROMPT_IDS))
    request.sampling_params.max_tokens, request.sampling_params.ignore_eos = MAX_TOKENS, True
    async with ready_channel(client.address) as channel:
        tokens = 0
        async for response in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, metadata=client.metadata):
            tokens += response.complete.prompt_tokens + response.complete.completion_tokens
    return tokens


_TEXT = {"ignore_eos": True, "temperature": 0, "prompt": PROMPT, "max_tokens": MAX_TOKENS}
_SAMPLING = {"ignore_eos": True, "temperature": 0, "max_tokens": MAX_TOKENS}
_CHAT = {"temperature": 0, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
_OLLAMA = {"stream": False, "options": {"num_predict": MAX_TOKENS, "temperature": 0}}
_DOCUMENTS = {"query": PROMPT, "documents": [PROMPT]}
_PAIR = {"text_1": PROMPT, "text_2": PROMPT}
_INPUTS = [pb.PoolInput(text=PROMPT)]
GENERATING: Mapping[str, Call] = {
    "POST /v1/chat/completions": _posts("/v1/chat/completions", **_CHAT),
    "POST /v1/completions": _posts("/v1/completions", **_TEXT),
    "POST /v1/messages": _posts("/v1/messages", **_CHAT),
    "POST /v1/responses": _posts("/v1/responses", input=PROMPT, max_output_tokens=MAX_TOKENS),
    "POST /v1/responses/compact": _posts("/v1/responses/compact", input=PROMPT, max_output_tokens=MAX_TOKENS),
    "POST /api/chat": _posts("/api/chat", messages=MESSAGES, **_OLLAMA),
    "POST /api/generate": _posts("/api/generate", prompt=PROMPT, **_OLLAMA),
    "POST /inference/v1/generate": _posts("/inference/v1/generate", token_ids=PROMPT_IDS, sampling_params=_SAMPLING),
    "VllmEngine/Generate": _tokens_for_tokens,
    "Inference/Generate": _generated,
    "Inference/GenerateSession": _a_session,
    "GRPCInferenceService/ModelInfer": _inferred,
    "GRPCInferenceService/ModelStreamInfer": _inferred_in_a_stream,
    "POST /v1/responses in the background": _in_background,
    "a line of POST /v1/batches": _as_a_line,
}
"""Entrances that generate."""
POOLING: Mapping[str, Call] = {
    "POST /v1/embeddings": _posts("/v1/embeddings", input=PROMPT),
    "POST /pooling": _posts("/pooling", input=PROMPT),
    "POST /classify": _posts("/classify", input=PROMPT),
    "POST /score": _posts("/score", **_PAIR),
    "POST /v1/score": _posts("/v1/score", **_PAIR),
    "POST /rerank": _posts("/rerank", **_DOCUMENTS),
    "POST /v1/rerank": _posts("/v1/rerank", **_DOCUMENTS),
    "POST /v2/rerank": _posts("/v2/rerank", **_DOCUMENTS),
    "POST /api/embed": _posts("/api/embed", input=PROMPT),
    "POST /api/embeddings": _ollamas_older_vector,
    "Inference/Embed": _pools("Embed", pb.EmbedRequest(model=MODEL, inputs=_INPUTS)),
    "Inference/Classify": _pools("Classify", pb.ClassifyRequest(model=MODEL, inputs=_INPUTS)),
    "Inference/Score": _pools("Score", pb.ScoreRequest(model=MODEL, query=PROMPT, documents=[PROMPT])),
    "Inference/Pool": _pools(
        "Pool", pb.PoolRequest(model=MODEL, inputs=_INPUTS, task=types_pb2.POOLING_TASK_TOKEN_EMBED)
    ),
}
"""Entrances that pool."""


async def _tokenized(client: Client) -> int:
    return int((await client.post("/tokenize", {"model": MODEL, "prompt": PROMPT}))["count"])


async def _detokenized(client: Client) -> int:
    answer = await client.post("/detokenize", {"model": MODEL, "tokens": [1, 2, 3]})
    assert answer["prompt"]
    return 3


async def _rendered(client: Client) -> int:
    return len((await client.post("/v1/chat/completions/render", {"model": MODEL, "messages": MESSAGES}))["token_ids"])


async def _rendered_prompts(client: Client) -> int:
    (asked,) = await client.post("/v1/completions/render", {"model": MODEL, "prompt": PROMPT})
    return len(asked["token_ids"])


_GENERATED = {"choices": [{"index": 0, "token_ids": PROMPT_IDS, "finish_reason": "stop"}]}
TOKENIZING: Mapping[str, Call] = {
    "POST /tokenize": _tokenized,
    "POST /detokenize": _detokenized,
    "POST /v1/messages/count_tokens": _posts("/v1/messages/count_tokens", messages=MESSAGES),
    "POST /v1/chat/completions/render": _rendered,
    "POST /v1/completions/render": _rendered_prompts,
    "POST /v1/chat/completions/derender": _posts("/v1/chat/completions/derender", generate_response=_GENERATED),
    "POST /v1/completions/derender": _posts("/v1/completions/derender", generate_responses=[_GENERATED]),
}
"""Entrances that only need the tokenizer."""


async def _of_no_file(client: Client) -> int:
    """Ask for a batch of a file that does not exist."""
    asked = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
    async with client.http() as http:
        response = await http.post("/v1/batches", json=asked)
    if response.status_code != 404:
        raise Refused(str(response.status_code))
    return 0


async def _a_conversation(client: Client) -> int:
    """Begin a conversation."""
    return await _kept(client, "", {"metadata": {"a": "b"}})


async def _kept(client: Client, path: str, body: dict[str, Any]) -> int:
    """Send one body below the path of conversations, of which the one that is named does not exist."""
    async with client.http() as http:
        response = await http.post(f"/v1/conversations{path}", json=body)
    if response.status_code != (404 if path else 200):
        raise Refused(str(response.status_code))
    return 0


STORING: Mapping[str, Call] = {
    "POST /v1/batches": _of_no_file,
    "POST /v1/conversations": _a_conversation,
    "POST /v1/conversations/*": lambda client: _kept(client, "/conv_none", {"metadata": {}}),
    "POST /v1/conversations/*/items": lambda client: _kept(client, "/conv_none/items", {"items": MESSAGES}),
}
WAYS: Mapping[str, Way] = {
    "Inference/Resume": ByCall(),
    "POST /v1/completions with Last-Event-ID": ByHeader("last-event-id"),
    "POST /v1/completions with Idempotency-Key": ByHeader("idempotency-key"),
}
"""Entrances by which a client continues a request."""
