"""Which clients there are: what each needs installed, and the command that runs it.

A script under ``scripts/`` is told by its environment where the mesh is: ``TOKENLOOM_URL`` (HTTP, without a path),
``TOKENLOOM_GRPC`` (host:port), ``TOKENLOOM_MODEL``, ``TOKENLOOM_CHECKPOINT`` (the model's directory),
``TOKENLOOM_PYTHON`` (one with transformers) and ``OUT``, a folder of its own, where it runs. It ends with status 0 when
everything was as it should be, and prints, last, one line for the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """One that users have."""

    name: str
    script: str
    """``.py`` runs with the environment's python, ``.mjs`` with node."""
    requirements: tuple[str, ...] = ()
    """For pip; for npm where the script is no Python."""
    package: str = ""
    """Whose version the table tells; by default the first requirement."""
    offline: bool = True
    """False: it insists on a hub that it then does not use."""
    environment: str = ""
    """An environment under ``$PEERS_ROOT`` that serves as well, where there is one."""

    @property
    def is_python(self) -> bool:
        return self.script.endswith(".py")

    @property
    def distribution(self) -> str:
        return self.package or self.requirements[0].partition("[")[0]


CLIENTS = (
    Client("openai (Python)", "openai_client.py", ("openai",)),
    Client("openai (JS)", "openai_client.mjs", ("openai",)),
    Client("ai-sdk", "ai_sdk_client.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    Client("langchain-openai", "langchain_client.py", ("langchain-openai",)),
    Client("instructor", "instructor_client.py", ("instructor",)),
    Client("litellm", "litellm_client.py", ("litellm",)),
    Client("tritonclient", "triton_client.py", ("tritonclient[grpc]",)),
    Client("buf curl", "buf_curl.mjs", ("@bufbuild/buf@1.75.0",), package="@bufbuild/buf"),
    Client("schemathesis", "schemathesis_client.py", ("schemathesis",)),
    Client("lm_eval", "lm_eval_client.py", ("lm_eval[api]", "transformers")),
    Client("vllm bench serve", "vllm_bench_client.py", ("vllm",), environment="vllm"),
    Client("guidellm", "guidellm_client.py", ("guidellm",)),
    Client("aiperf", "aiperf_client.py", ("aiperf",), offline=False),
)
