"""Lists the request fields of OpenAI's and vLLM's embeddings."""

from .foreign_field import ForeignApi, ignored, works
from .openai_fields import USER

EMBEDDINGS = ForeignApi(
    "OpenAI and vLLM embeddings",
    "/v1/embeddings",
    {"input": "ab"},
    (
        works("input", ["a", "bc"], "One text or several, or token ids; at most 2048."),
        works("model", "fake", "The served model; null too."),
        works("dimensions", 1, "First numbers of each vector, if the model supports it."),
        works("encoding_format", "base64", "float or base64."),
        ignored("user", "me", "Keys identify tenants."),
        works("truncate_prompt_tokens", 1, "Tokens that are kept of each input; -1: the context."),
        works("truncation_side", "right", "right keeps the first tokens.", truncate_prompt_tokens=1),
        works("add_special_tokens", False, "Encodes texts without the special tokens."),
        works("normalize", False, "False: vectors as they are."),
        works("use_activation", False, "Newer name of normalize."),
        works("priority", 3, "Lower runs first; refused if engines do not schedule by priority."),
        works("cache_salt", "mine", "Separates cached prefixes within the tenant."),
        ignored("request_id", "mine", "Send the header x-request-id."),
        ignored("mm_processor_kwargs", {"a": 1}, "Models read text only."),
    ),
)

CHAT_EMBEDDINGS = ForeignApi(
    "vLLM embeddings of conversations",
    "/v1/embeddings",
    {"messages": [USER]},
    (
        works("messages", [USER, USER], "A conversation as the only input."),
        works("add_generation_prompt", True, "Opens the assistant's turn."),
        works("continue_final_message", True, "Leaves the last message open."),
        works("chat_template_kwargs", {"enable_thinking": False}, "Variables of the chat template."),
    ),
)
