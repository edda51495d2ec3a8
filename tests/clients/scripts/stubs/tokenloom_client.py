"""The wheel ``tokenloom-client`` alone, as a user installs it: its stubs with grpcio, and its client."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

import tokenloom
from tokenloom.client import Client, errors
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ADDRESS, MODEL = os.environ["TOKENLOOM_GRPC"], os.environ["TOKENLOOM_MODEL"]
QUESTION, ANSWER = "What is 3 plus 4?", "3 + 4 = 7."


def request(n: int = 1, **sampling: object) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content=QUESTION)
    params = types_pb2.SamplingParams(**{"temperature": 0, **sampling})
    return inference_pb2.GenerateRequest(
        model=MODEL, chat=inference_pb2.ChatPrompt(messages=[message]), sampling_params=params, n=n
    )


def texts(parts: Iterable[inference_pb2.GenerateResponse]) -> list[str]:
    """Return the text of each sample; the last part holds the reason of an end, and the usage."""
    found: dict[int, str] = {}
    for part in parts:
        found[part.index] = found.get(part.index, "") + part.text
    assert part.finish_reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH), part
    assert part.usage.prompt_tokens > 0, part
    return [found[index] for index in sorted(found)]


def ask_with_stubs() -> None:
    with grpc.insecure_channel(ADDRESS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10).models[0].name == MODEL
        assert texts(stub.Generate(request(), timeout=60)) == [ANSWER]
        assert texts(stub.Generate(request(n=2, temperature=1, top_k=1), timeout=60)) == [ANSWER, ANSWER]
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        bound = types_pb2.StructuredOutputs(json=json.dumps(schema))
        (text,) = texts(stub.Generate(request(max_tokens=64, structured_outputs=bound), timeout=60))
        assert isinstance(json.loads(text)["sum"], int), text
        left = stub.Generate(request(max_tokens=200), timeout=60)
        next(left)
        left.cancel()
        try:
            texts(stub.Generate(request(temperature=-1), timeout=60))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        refused = error_details_pb2.BadRequest()
        assert any(each.Unpack(refused) for each in status_pb2.Status.FromString(details).details)
        assert "temperature" in refused.field_violations[0].field, refused


def ask_with_client() -> None:
    with Client(ADDRESS, timeout=60) as client:
        messages = [{"role": "user", "content": QUESTION}]
        assert client.chat(messages, temperature=0).text == ANSWER
        assert "".join(chunk.text for chunk in client.stream_chat(messages, temperature=0)) == ANSWER
        try:
            client.generate("x", temperature=-1)
        except errors.InvalidArgument as error:
            assert error.field == "temperature", error.field
        else:
            raise AssertionError("a wrong temperature is not refused")


assert Path(tokenloom.__file__).is_relative_to(sys.prefix), tokenloom.__file__
ask_with_stubs()
ask_with_client()
assert not {"torch", "numpy", "transformers"} & {*sys.modules}
print(
    "built, installed alone: models, a streamed chat, two samples, a schema, one left, an error with its field; Client"
)
