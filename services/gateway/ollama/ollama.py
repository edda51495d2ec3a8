"""Reads bodies of Ollama's API."""

from dataclasses import dataclass, replace

from ..generation.running_generation import RunningGeneration
from ..http.error_form import ErrorForm
from ..openai.body_reader import AnswerOptions, Body
from ..openai.chat import ChatApi
from ..records.generate_request import GenerateRequest
from ..tenants.tenant import Tenant
from .ollama_answer import OllamaAnswer
from .ollama_body import OPTIONS, OllamaRequest, chat_body

OLLAMA = ErrorForm(lambda error: {"error": error.message}, is_lines=True)


@dataclass(frozen=True, slots=True)
class OllamaApi:
    """Reads bodies of an endpoint and makes its answers. A body becomes that of a chat, which has the same job."""

    chats: ChatApi
    is_chat: bool
    is_resumable = False

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        reader = self.chats.reader
        fields = reader.read(body, OllamaRequest)
        # Read as a chat, so that limits, tools and reasoning are those of every other API. Ollama's endpoints that
        # manage models have no counterpart in a mesh.
        job, options = self.chats.read(chat_body(fields, is_chat=self.is_chat), tenant)
        unread = (f"options.{name}" for name in fields.options or () if name not in OPTIONS)
        return job, replace(options, ignored=(*reader.ignored(body, OllamaRequest), *unread))

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> OllamaAnswer:
        return OllamaAnswer(generation, options, is_chat=self.is_chat)
