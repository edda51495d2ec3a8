"""What the process of a service does not import when it starts: each module costs memory in every process."""

import subprocess
import sys

import pytest

NEVER = {
    *("torch", "transformers", "triton", "ray", "xgrammar", "llguidance", "safetensors", "PIL", "av", "gguf"),
    *("huggingface_hub", "typer", "rich", "cryptography", "opentelemetry", "mcp", "httpx", "requests", "pydantic"),
    *("unittest", "pydoc", "xml", "sqlite3", "doctest", "lib2to3"),
}
NEEDED = {
    "numpy": {"coordinator", "output_processor", "engine"},
    "jinja2": {"tokenizer"},
    "tokenizers": {"tokenizer", "output_processor"},
    "zmq": {"engine"},
    "uvicorn": {"gateway"},
    "python_multipart": {"gateway"},
}
"""The services that need a package."""


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "output_processor", "coordinator", "engine"])
def test_a_service_imports_what_it_needs(service: str) -> None:
    code = f"import sys, tokenloom.services.{service}.__main__\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert not imported & NEVER
    assert {name for name, services in NEEDED.items() if name in imported} == {
        name for name, services in NEEDED.items() if service in services
    }
