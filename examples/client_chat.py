"""Chat with a mesh through the package's blocking client. Run ``tokenloom serve`` first."""

import argparse

from tokenloom.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("--api-key")
    parser.add_argument("prompt", nargs="?", default="What is chunked prefill?")
    args = parser.parse_args()
    with Client(args.address, api_key=args.api_key, timeout=60) as client:
        for chunk in client.stream_chat([{"role": "user", "content": args.prompt}], temperature=0, max_tokens=200):
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{chunk.usage.completion_tokens} tokens, {chunk.finish_reason}]")


if __name__ == "__main__":
    main()
