"""Chat with a mesh through the package's blocking client. Run ``tokenloom serve`` first.

A key, if the mesh needs one, comes from ``TOKENLOOM_API_KEY``.
"""

import argparse
import os

from tokenloom.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("prompt", nargs="?", default="What is chunked prefill?")
    args = parser.parse_args()
    with Client(args.address, api_key=os.environ.get("TOKENLOOM_API_KEY"), timeout=60) as client:
        for chunk in client.stream_chat([{"role": "user", "content": args.prompt}], temperature=0, max_tokens=200):
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{chunk.usage.completion_tokens} tokens, {chunk.finish_reason}]")


if __name__ == "__main__":
    main()
