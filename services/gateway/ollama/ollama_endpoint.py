"""Endpoints of Ollama's API: those that generate, and those that manage models, of which a mesh has only the served."""

from dataclasses import dataclass

from tokenloom.request import errors

from ..assistant.message_plans import MessagePlans
from ..encoding.sse import encode_json
from ..endpoints.generation_endpoint import GenerationEndpoint
from ..http.http_exchange import HttpExchange
from ..http.request_body import BodyParser
from ..openai.body_reader import Body
from ..serving.served_mesh import ServedMesh
from .ollama import NothingAsked, OllamaApi
from .ollama_answer import line_of
from .ollama_models import show_model


@dataclass(frozen=True, slots=True)
class OllamaEndpoint:
    """Answers in a conversation or to a prompt. A request without either loads or unloads the model in Ollama; here the
    engines stay."""

    endpoint: GenerationEndpoint
    api: OllamaApi

    async def __call__(self, exchange: HttpExchange) -> None:
        held = [await self.endpoint.read(exchange)]
        nothing = held[0][1].request
        if not isinstance(nothing, NothingAsked):
            await self.endpoint(exchange, held)
            return
        adapter = held[0][0].adapter
        name = self.endpoint.names.own[0] if adapter is None else adapter.name
        turn = {"content" if self.api.is_chat else "response": ""}
        line = line_of(name, turn, is_chat=self.api.is_chat, ends=True) | {"done_reason": nothing.reason}
        await exchange.respond(200, encode_json(line))


@dataclass(frozen=True, slots=True)
class OllamaModelCalls:
    """Answers calls that name a model in their body."""

    mesh: ServedMesh
    plans: MessagePlans
    parser: BodyParser
    max_body_bytes: int
    began: str
    """When the gateway started."""

    async def show(self, exchange: HttpExchange) -> None:
        """Describe a model. Raises ``ModelNotFound``."""
        await self._read(exchange)
        await exchange.respond(200, encode_json(show_model(self.mesh, self.plans, self.began)))

    async def pull(self, exchange: HttpExchange) -> None:
        """Report that a served model is there. Raises ``ModelNotFound`` for others: a mesh draws no models."""
        body = await self._read(exchange)
        done = encode_json({"status": "success"})
        if body.get("stream") is False:
            await exchange.respond(200, done)
        else:
            await exchange.respond(200, done + b"\n", b"application/x-ndjson")

    async def refuse(self, exchange: HttpExchange) -> None:
        """Raise ``Unimplemented``."""
        raise errors.Unimplemented("the models of a mesh are those that its operator has started; none can be changed")

    async def _read(self, exchange: HttpExchange) -> Body:
        with await exchange.read_body(self.max_body_bytes) as received:
            body = await self.parser.read(received.data, dict)
        # Older clients of Ollama send the model's name as `name`.
        self.mesh.models.find(body.get("model") or body.get("name"))
        return body
