#!/usr/bin/env bash
# The first machine: every part but the decode engine. Usage: first.sh ITS-ADDRESS CERTS [MODEL]
set -euo pipefail
here=$1 certs=$2 model=${3:-tokenloom-demo}
. "$(dirname "$0")/part.sh"

part coordinator --listen "$here:7000"
part tokenizer --listen "$here:7001" --model "$model"
part output_processor --listen "$here:7002" --coordinator "$here:7000" --model "$model"
part engine --role prefill --instance-id prefill-0 --listen "$here:7010" --coordinator "$here:7000" --model "$model" \
    --kv-listen "$here:7011" --kv-transports socket --kv-socket-listen "$here:7012"
part gateway --listen 127.0.0.1:9000 --http-listen 127.0.0.1:8000 --coordinator "$here:7000" \
    --tokenizers "$here:7001" --output-processors "$here:7002"
wait
