"""Which clients there are: what each needs installed, and the command that runs it.

A script under ``scripts/`` reads from its environment where the mesh is: ``TOKENLOOM_URL`` (HTTP, without a path),
``TOKENLOOM_GRPC`` (host:port), ``TOKENLOOM_MODEL``, ``TOKENLOOM_CHECKPOINT`` (the model's directory),
``TOKENLOOM_PYTHON`` (one with transformers), ``TOKENLOOM_ADMIN_KEY`` and ``OUT``, a folder of its own, where it runs.
``SCRIPTED_URL`` and ``SCRIPTED_MODEL`` are those of a scripted model, which finishes tasks; ``SCRIPTED_WORDS`` is what
the file ``made.txt`` holds then. ``PICTURE_URL`` and ``PICTURE_MODEL`` are those of a model that reads images, and
``PICTURE_FILE`` is one. ``TOKENLOOM_STUBS`` is the folder of what `make stubs` writes. ``scripts/faults.py`` has the
requests that fail.
It ends with status 0 when everything was as it should be, and prints, last, one line for the table.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """One that users have."""

    name: str
    script: str
    """``.py`` runs with the environment's python, ``.mjs`` with node."""
    requirements: tuple[str, ...]
    """For pip; for npm where the script is no Python. The first is the client: the table tells its version."""
    torch: bool = False
    """It draws torch; only texts are handled, so any build of it will do."""
    without: tuple[str, ...] = ()
    """Packages that are removed again: they fit another build of torch only, and the client works without them."""
    offline: bool = True
    """False: it takes the word that there is no hub for one that a local tokenizer is none."""
    program: str = ""
    """The program of the machine that is the client, where no package is."""
    environment: str = ""
    """An environment under ``$PEERS_ROOT`` that serves as well, where there is one."""
    stubs: str = ""
    """The language of the stubs that it is generated from."""

    @property
    def is_python(self) -> bool:
        return self.script.endswith(".py")

    @property
    def distribution(self) -> str:
        """The package's name, without version and extras."""
        found = re.match(r"@?[^@\[=]+", self.requirements[0])
        assert found is not None
        return found.group()


CLIENTS = (
    Client("openai (Python)", "openai_client.py", ("openai==3.54.0",)),
    Client("openai (JS)", "openai_client.mjs", ("openai@6.49.0", "zod@4.6.7")),
    Client("openai (embeddings)", "vectors/openai_vectors_client.py", ("openai==3.54.0",)),
    Client("openai (embeddings, JS)", "vectors/openai_vectors_client.mjs", ("openai@6.49.0",)),
    Client("langchain-openai (embeddings)", "vectors/langchain_vectors_client.py", ("langchain-openai==1.7.3",)),
    Client("llama-index", "vectors/llama_index_client.py", ("llama-index-embeddings-openai-like==0.4.0",)),
    Client("llama-index (JinaRerank)", "vectors/jina_client.py", ("llama-index-postprocessor-jinaai-rerank==0.6.0",)),
    Client("cohere", "vectors/cohere_client.py", ("cohere==7.3.1",)),
    Client("mteb", "vectors/mteb_client.py", ("mteb==2.26.24", "openai==3.54.0"), torch=True),
    Client("openai (Responses)", "responses_client.py", ("openai==3.54.0",)),
    Client("openai (Responses, JS)", "responses_client.mjs", ("openai@6.49.0",)),
    Client("anthropic (Python)", "anthropic_client.py", ("anthropic==2.12.0",)),
    Client("anthropic (JS)", "anthropic_client.mjs", ("@anthropic-ai/sdk@1.12.0",)),
    Client("ollama (Python)", "ollama_client.py", ("ollama==0.6.3",)),
    Client("ollama (JS)", "ollama_client.mjs", ("ollama@0.6.4",)),
    Client("openai (images)", "pictures/openai_client.py", ("openai==3.54.0",)),
    Client("openai (images, JS)", "pictures/openai_client.mjs", ("openai@6.49.0", "zod@4.6.7")),
    Client("anthropic (images)", "pictures/anthropic_client.py", ("anthropic==2.12.0",)),
    Client("ollama (images)", "pictures/ollama_client.py", ("ollama==0.6.3",)),
    Client("litellm (images)", "pictures/litellm_client.py", ("litellm[mcp]==1.106.2",)),
    Client("langchain-openai (images)", "pictures/langchain_client.py", ("langchain-openai==1.7.3",)),
    Client("Codex CLI", "codex_client.mjs", ("@openai/codex@0.169.0",)),
    Client("Claude Code", "claude_code_client.mjs", ("@anthropic-ai/claude-code@2.1.330",)),
    Client("OpenCode", "opencode_client.mjs", ("opencode-ai@1.18.33",)),
    Client("aider", "aider_client.py", ("aider-chat==0.86.2",)),
    Client("ai-sdk", "ai_sdk_client.mjs", ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.87", "zod@4.6.7")),
    Client("langchain-openai", "langchain_client.py", ("langchain-openai==1.7.3",)),
    Client("agno", "agno_client.py", ("agno==3.1.10", "openai==3.54.0")),
    Client(
        "@langchain/openai",
        "langchain_client.mjs",
        ("@langchain/openai@1.5.8", "@langchain/core@1.4.0", "zod@4.6.7"),
    ),
    Client("crewai", "crewai_client.py", ("crewai==1.15.30",)),
    Client("inspect-ai", "inspect_client.py", ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0")),
    Client("strands-agents", "strands_client.py", ("strands-agents[anthropic,ollama,openai]==1.62.0",)),
    Client(
        "pydantic-ai",
        "pydantic_ai_client.py",
        ("pydantic-ai-slim[anthropic,openai]==2.68.0", "openai==3.57.0", "anthropic==2.14.0"),
    ),
    Client("openai-agents", "openai_agents_client.py", ("openai-agents==0.24.0",)),
    Client("semantic-kernel", "semantic_kernel_client.py", ("semantic-kernel==1.45.0",)),
    Client("instructor", "instructor_client.py", ("instructor==1.17.0",)),
    Client("guidance", "guidance_client.py", ("guidance==0.3.1", "openai==3.54.0")),
    Client("litellm", "litellm_client.py", ("litellm[mcp]==1.106.2",)),
    Client("tritonclient", "triton_client.py", ("tritonclient[grpc]==2.73.0",)),
    Client("java.net.http", "jvm_client.py", (), program="java"),
    Client("buf curl", "buf_curl.mjs", ("@bufbuild/buf@1.75.0",)),
    Client("@grpc/grpc-js (stubs)", "stubs/grpc_js_client.mjs", ("@grpc/grpc-js@1.14.7",), stubs="npm"),
    Client("grpc-go (stubs)", "stubs/go_client.py", (), stubs="go"),
    Client("tokenloom-client (stubs)", "stubs/tokenloom_client.py", (), stubs="python"),
    Client(
        "openapi-python-client",
        "generators/openapi_python_client.py",
        ("openapi-python-client==0.29.1", "openapi-spec-validator==0.9.0", "ruff==0.17.6"),
    ),
    Client(
        "openapi-typescript",
        "generators/openapi_typescript_client.mjs",
        ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3", "@types/node@20.19.43"),
    ),
    Client(
        "@hey-api/openapi-ts",
        "generators/hey_api_client.mjs",
        ("@hey-api/openapi-ts@0.95.0", "typescript@5.9.3", "@types/node@20.19.43", "esbuild@0.28.2"),
    ),
    Client("schemathesis", "schemathesis_client.py", ("schemathesis==4.32.5",)),
    Client("lm_eval", "lm_eval_client.py", ("lm_eval[api]==0.4.13", "transformers==5.23.0")),
    Client(
        "vllm bench serve",
        "vllm_bench_client.py",
        ("vllm[bench]==0.32.0",),
        without=("torchvision", "torchaudio", "torchcodec"),
        environment="vllm",
    ),
    Client("guidellm", "guidellm_client.py", ("guidellm==0.8.1",), torch=True),
    Client("aiperf", "aiperf_client.py", ("aiperf==0.13.0",), offline=False),
)
