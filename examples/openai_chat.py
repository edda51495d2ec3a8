"""Chat with a mesh through the openai package. Run ``pip install openai`` and ``tokenloom serve`` first.

A key, if the mesh needs one, comes from ``OPENAI_API_KEY``.
"""

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("prompt", nargs="?", default="What is continuous batching?")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": args.prompt}], temperature=0, stream=True
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
