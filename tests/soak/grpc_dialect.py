"""Conversations over the public gRPC API, as the replay has them."""

import json
from collections.abc import Sequence

from tests.services.gateway.fakes import MODEL
from tests.soak.dialects import Asked, Native, Part, Turn, calls, joined
from tokenloom.v1 import inference_pb2, inference_pb2_grpc


class Grpc:
    """``Inference.Generate``."""

    name = "grpc"

    def __init__(self, inference: "inference_pb2_grpc.InferenceAsyncStub") -> None:
        self._inference = inference

    async def ask(self, turns: Sequence[Turn], asked: Asked) -> Native:
        chat = inference_pb2.ChatPrompt(messages=map(self._message, turns))
        for tool in asked.tools:
            function = tool["function"]
            chat.tools.add().function.CopyFrom(
                inference_pb2.Function(name=function["name"], parameters=json.dumps(function["parameters"]))
            )
        if asked.tools and asked.choice == "required":
            chat.tool_choice.mode = inference_pb2.TOOL_CHOICE_MODE_REQUIRED
        elif asked.tools and asked.choice != "auto":
            chat.tool_choice.function = asked.choice
        native = inference_pb2.ChatMessage(role="assistant")
        stream = self._inference.Generate(inference_pb2.GenerateRequest(model=MODEL, chat=chat))
        responses = [response async for response in stream]
        for response in responses[: round(len(responses) * asked.share)]:
            native.content += response.text
            native.reasoning += response.reasoning
            for call in response.tool_calls:
                if call.index == len(native.tool_calls):
                    native.tool_calls.add(id=call.id).function.CopyFrom(call.function)
                else:
                    native.tool_calls[call.index].function.arguments += call.function.arguments
        return native

    def _message(self, turn: Turn) -> inference_pb2.ChatMessage:
        if turn.role == "assistant":
            native: inference_pb2.ChatMessage = turn.native["grpc"]
            return native
        call_id = "" if turn.call is None else turn.call.call_id
        return inference_pb2.ChatMessage(role=turn.role, content="\n".join(turn.texts), tool_call_id=call_id)

    def read(self, native: Native) -> list[Part]:
        parts = [Part("thought", native.reasoning)] if native.reasoning else []
        parts += [Part("text", native.content)] if native.content else []
        made = ((call.id, call.function) for call in native.tool_calls)
        return [*parts, *(Part("call", each.arguments, each.name, own_id) for own_id, each in made)]

    def write(self, parts: Sequence[Part]) -> Native:
        message = inference_pb2.ChatMessage(role="assistant", content=joined(parts, "text"))
        message.reasoning = joined(parts, "thought")
        for each in calls(parts):
            call = message.tool_calls.add(id=each.call_id)
            call.function.name, call.function.arguments = each.name, each.text
        return message
