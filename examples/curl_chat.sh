#!/bin/sh
# Chat with a mesh through curl. Run `tokenloom serve` first.
set -eu
curl --fail-with-body --silent --show-error --no-buffer "${TOKENLOOM_URL:-http://127.0.0.1:8000}/v1/chat/completions" \
    --header 'Content-Type: application/json' \
    --data '{"model": "tokenloom-demo", "stream": true, "temperature": 0,
             "messages": [{"role": "user", "content": "What is a KV block?"}]}'
