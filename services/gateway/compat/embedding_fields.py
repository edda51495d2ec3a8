"""Lists the request fields of OpenAI's and vLLM's embeddings."""

from .foreign_field import ForeignApi, ignored, works
from .openai_fields import USER

EMBEDDINGS = ForeignApi(
    "OpenAI and vLLM embeddings",
    "/v1/embeddings",
    {"input": "ab"},
    (
        works("input", ["a", "bc"]),
        works("model", "fake"),
        works("dimensions", 1),
        works("encoding_format", "base64"),
        ignored("user", "me", "Keys identify tenants."),
        works("truncate_prompt_tokens", 1),
        works("truncation_side", "right", truncate_prompt_tokens=1),
        works("add_special_tokens", False),
        works("normalize", False),
        works("use_activation", False),
        works("priority", 3),
        works("cache_salt", "mine"),
        ignored("request_id", "mine", "Send the header x-request-id."),
        ignored("mm_processor_kwargs", {"a": 1}, "Models read text only."),
    ),
)

CHAT_EMBEDDINGS = ForeignApi(
    "vLLM embeddings of conversations",
    "/v1/embeddings",
    {"messages": [USER]},
    (
        works("messages", [USER, USER]),
        works("add_generation_prompt", True),
        works("continue_final_message", True),
        works("chat_template_kwargs", {"enable_thinking": False}),
    ),
)
