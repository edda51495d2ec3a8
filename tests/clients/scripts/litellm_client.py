"""litellm: its providers for OpenAI-compatible servers, for vLLM's, Anthropic's and Ollama."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the internet for prices otherwise
import faults
import litellm

URL, MODEL = os.environ["TOKENLOOM_URL"] + "/v1", os.environ["TOKENLOOM_MODEL"]
COMMON = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 40, "num_retries": 0}
MESSAGES = [{"role": "user", "content": "What is a KV block?"}]


async def streamed(provider: str) -> str:
    stream = await litellm.acompletion(f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **COMMON)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def tools(model: str) -> None:
    """A forced call, whole and streamed."""
    parameters = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    function = {"name": "answer", "parameters": {**parameters, "additionalProperties": False}}
    asking = {**COMMON, "messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    asking["tool_choice"] = {"type": "function", "function": {"name": "answer"}}
    whole = litellm.completion(model, **asking)
    (call,) = whole.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["sure"], bool)
    built = litellm.stream_chunk_builder(list(litellm.completion(model, stream=True, **asking)), messages=MESSAGES)
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"


def of_ollama() -> None:
    """Both providers: of prompts that litellm renders itself, and of chats."""
    own = {"messages": MESSAGES, "api_base": os.environ["TOKENLOOM_URL"], "temperature": 0, "num_retries": 0}
    for provider in ("ollama", "ollama_chat"):
        model = f"{provider}/{MODEL}"
        whole = litellm.completion(model, max_tokens=40, **own)
        assert whole.choices[0].message.content
        chunks = litellm.completion(model, max_tokens=40, stream=True, **own)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert litellm.get_model_info(model, api_base=own["api_base"])["max_input_tokens"] > 0
        # More than the context holds: Ollama cuts the limit.
        assert litellm.completion(model, max_tokens=100_000, **own).choices[0].message.content
        try:
            litellm.completion(f"{provider}/other", **own)
        except litellm.NotFoundError:
            continue
        raise AssertionError("an unknown model was taken")


def fail(provider: str) -> None:
    """litellm knows no words of a long context for Ollama, and takes Anthropic's ``overloaded_error`` for 500."""
    path = "/v1" if provider in {"openai", "hosted_vllm"} else ""

    def ask(fault: faults.Fault) -> object:
        own = {"api_base": fault.url + path, "api_key": "none", "num_retries": 0, "max_retries": 0, "max_tokens": 16}
        own |= {"temperature": fault.temperature, "timeout": fault.timeout}
        return litellm.completion(
            f"{provider}/{fault.model_name}", messages=[{"role": "user", "content": fault.text}], **own
        )

    away = litellm.InternalServerError if provider == "anthropic" else litellm.ServiceUnavailableError
    too_long = litellm.BadRequestError if provider.startswith("ollama") else litellm.ContextWindowExceededError
    expected = {
        faults.TOO_LONG: too_long,
        faults.UNKNOWN_MODEL: litellm.NotFoundError,
        faults.BAD_FIELD: litellm.BadRequestError,
        faults.RATE_LIMIT: litellm.RateLimitError,
        faults.NOT_SERVED: away,
        faults.TIMEOUT: litellm.Timeout,
    }
    faults.recognised(ask, expected)


def of_anthropic() -> None:
    own = {"messages": MESSAGES, "api_base": os.environ["TOKENLOOM_URL"], "api_key": "none", "temperature": 0}
    whole = litellm.completion(f"anthropic/{MODEL}", max_tokens=40, **own)
    assert whole.choices[0].message.content
    chunks = litellm.completion(f"anthropic/{MODEL}", max_tokens=40, stream=True, **own)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def routed() -> None:
    entry = {"model_name": "ours", "litellm_params": {"model": f"hosted_vllm/{MODEL}", **COMMON}}
    router = litellm.Router([entry])
    assert router.completion("ours", messages=MESSAGES).choices[0].message.content


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        whole = litellm.completion(f"{provider}/{MODEL}", messages=MESSAGES, **COMMON)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0
        assert asyncio.run(streamed(provider)) == whole.choices[0].message.content
        tools(f"{provider}/{MODEL}")
    of_ollama()
    of_anthropic()
    for provider in ("openai", "hosted_vllm", "anthropic", "ollama", "ollama_chat"):
        fail(provider)
    routed()
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once upon", **COMMON)
    assert text.choices[0].text
    try:
        litellm.completion(f"openai/{MODEL}", messages=MESSAGES, **{**COMMON, "temperature": -1})
    except litellm.BadRequestError:
        print("openai/, hosted_vllm/, anthropic/, ollama/, ollama_chat/: all kinds of errors; tools; a Router")
        return
    raise AssertionError("a temperature of -1 was taken")


if __name__ == "__main__":
    main()
