"""litellm: its provider for OpenAI-compatible servers, and the one for vLLM's."""

import asyncio
import os

import litellm

URL, MODEL = os.environ["TOKENLOOM_URL"] + "/v1", os.environ["TOKENLOOM_MODEL"]
COMMON = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 40, "num_retries": 0}
MESSAGES = [{"role": "user", "content": "What is a KV block?"}]


async def streamed(provider: str) -> str:
    stream = await litellm.acompletion(f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **COMMON)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        whole = litellm.completion(f"{provider}/{MODEL}", messages=MESSAGES, **COMMON)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0
        assert asyncio.run(streamed(provider)) == whole.choices[0].message.content
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once upon", **COMMON)
    assert text.choices[0].text
    try:
        litellm.completion(f"openai/{MODEL}", messages=MESSAGES, **{**COMMON, "temperature": -1})
    except litellm.BadRequestError:
        print("openai/ and hosted_vllm/: completion, acompletion streamed; text_completion; errors")
        return
    raise AssertionError("a temperature of -1 was taken")


if __name__ == "__main__":
    main()
