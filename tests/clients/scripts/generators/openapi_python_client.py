"""openapi-python-client: the document is valid, every operation is generated, and what is generated chats."""

import importlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from openapi_spec_validator import OpenAPIV31SpecValidator

URL, OUT = os.environ["TOKENLOOM_URL"], Path(os.environ["OUT"])


def main() -> None:
    with urllib.request.urlopen(f"{URL}/openapi.json") as response:
        document = json.load(response)
    OpenAPIV31SpecValidator(document).validate()
    source = OUT / "openapi.json"
    source.write_text(json.dumps(document))
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(source)]
    package = OUT / "generated"
    done = subprocess.run([*command, "--output-path", str(package)], check=True, capture_output=True, text=True)
    assert "WARNING" not in done.stdout, done.stdout
    operations = sum(len(methods) for methods in document["paths"].values())
    made = [path for path in package.glob("tokenloom_client/api/*/*.py") if path.name != "__init__.py"]
    assert len(made) == operations, (len(made), operations)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True)
    sys.path.insert(0, str(package))
    chat()
    print(f"a valid document; {operations} operations generated and compiled; a chat")


def chat() -> None:
    models = importlib.import_module("tokenloom_client.models")
    call = importlib.import_module("tokenloom_client.api.openai.post_v1_chat_completions")
    client = importlib.import_module("tokenloom_client").Client(base_url=URL)
    body = models.ChatCompletionRequest.from_dict(
        {"messages": [{"role": "user", "content": "What is a KV block?"}], "max_tokens": 16, "temperature": 0}
    )
    answer = call.sync(client=client, body=body)
    assert isinstance(answer, models.ChatCompletion), answer
    assert answer.choices[0].message.content


main()
