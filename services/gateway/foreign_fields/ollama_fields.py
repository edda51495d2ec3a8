"""Lists the request fields of Ollama's chats."""

from .foreign_field import ForeignApi, ignored, refused, works
from .openai_fields import SCHEMA, TOOL, USER

CHAT = ForeignApi(
    "Ollama chat",
    "/api/chat",
    {"model": "fake", "messages": [USER]},
    (
        works("messages", [USER, {"role": "assistant", "content": "a"}, USER], "Roles as in Ollama's API."),
        refused("messages[].images", [USER | {"images": ["AA=="]}], "Models read text only."),
        works("tools", [TOOL], "Functions, at most 128."),
        works("format", SCHEMA, "json, or a schema."),
        ignored("keep_alive", "5m", "The model stays loaded."),
        ignored("options.num_ctx", {"num_ctx": 4096}, "Operators set --max-model-len."),
        works("options.num_predict", {"num_predict": 9}, "Limit of the output."),
        works("options.repeat_penalty", {"repeat_penalty": 1.5}, "Sampling parameter."),
        works("options.seed", {"seed": 7}, "Equal seeds draw equal tokens."),
        works("options.stop", {"stop": ["END"]}, "At most 16 texts."),
        works("options.temperature", {"temperature": 0.5}, "Sampling parameter."),
        works("options.top_k", {"top_k": 3}, "Sampling parameter."),
        works("stream", False, "False: one object instead of lines."),
        works("think", False, "Variable enable_thinking of the chat template; a text is its reasoning_effort."),
    ),
)
