"""Lists the request fields of Ollama's chats."""

from .foreign_field import ForeignApi, ignored, refused, works
from .openai_fields import SCHEMA, TOOL, USER

CHAT = ForeignApi(
    "Ollama chat",
    "/api/chat",
    {"model": "fake", "messages": [USER]},
    (
        works("messages", [USER, {"role": "assistant", "content": "a"}, USER]),
        refused("messages[].images", [USER | {"images": ["AA=="]}], "Models read text only."),
        works("tools", [TOOL]),
        works("format", SCHEMA),
        ignored("keep_alive", "5m", "The model stays loaded."),
        ignored("options.num_ctx", {"num_ctx": 4096}, "Operators set --max-model-len."),
        works("options.num_predict", {"num_predict": 9}),
        works("options.repeat_penalty", {"repeat_penalty": 1.5}),
        works("options.seed", {"seed": 7}),
        works("options.stop", {"stop": ["END"]}),
        works("options.temperature", {"temperature": 0.5}),
        works("options.top_k", {"top_k": 3}),
        works("stream", False),
        works("think", False),
    ),
)
