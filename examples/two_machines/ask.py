"""Send one chat with a long prompt, and print the answer and where its time went."""

import json
import sys
import urllib.request

_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
_NOTES = " ".join(f"Note {number}: the lamp is on the table." for number in range(40))


def main() -> None:
    messages = [{"role": "user", "content": f"{_NOTES} What is prefill?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60, "return_timeline": True}
    request = urllib.request.Request(
        f"{_URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    print(answer["choices"][0]["message"]["content"])
    print(json.dumps(answer["timeline"]))


if __name__ == "__main__":
    main()
