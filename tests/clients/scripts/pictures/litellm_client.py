"""litellm: a picture through its providers for OpenAI-compatible servers, vLLM's, Anthropic's and Ollama."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the internet for prices otherwise
import litellm
from shown import ANSWER, MODEL, TURN, URL

PROVIDERS = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
for provider, base in PROVIDERS.items():
    asked = {"api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 60, "num_retries": 0}
    answer = litellm.completion(f"{provider}/{MODEL}", messages=[TURN], **asked)
    assert answer.choices[0].message.content.strip() == ANSWER, (provider, answer)
print(", ".join(f"{provider}/" for provider in PROVIDERS))
