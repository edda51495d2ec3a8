#!/usr/bin/env bash
# The second machine: a decode engine. Usage: second.sh ITS-ADDRESS FIRST-ADDRESS CERTS [MODEL]
set -euo pipefail
here=$1 first=$2 certs=$3 model=${4:-tokenloom-demo}
. "$(dirname "$0")/part.sh"

part engine --role decode --instance-id decode-0 --listen "$here:7010" --coordinator "$first:7000" --model "$model" \
    --kv-listen "$here:7011" --kv-transports socket --kv-socket-listen "$here:7012"
wait
