"""Sentences of the pages with numbers of the code, filled from the code."""

import re

from tokenloom.engine_core.data import draft_counts as draft_history
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.parallel_config import EplbConfig
from tokenloom.model_files.model_path import PACKAGED
from tokenloom.request import adapter_names as adapter_name
from tokenloom.request import output_constraints, sampling_params, validation
from tokenloom.services.coordinator import lease
from tokenloom.services.gateway.batches import batch_run, batch_store
from tokenloom.services.gateway.formats import tool_request
from tokenloom.services.gateway.generation import admission, charge, running_pooling
from tokenloom.services.gateway.grpc import chat_prompt
from tokenloom.services.gateway.http import http_exchange as pieces
from tokenloom.services.gateway.http import large_json, request_body
from tokenloom.services.gateway.http.server import http_protocol
from tokenloom.services.gateway.mesh import encoder_client
from tokenloom.services.gateway.metrics import usage_counts
from tokenloom.services.gateway.page import traffic
from tokenloom.services.gateway.records import pooling_input
from tokenloom.services.gateway.request_log import finished_request as recent_requests
from tokenloom.services.gateway.responses import mcp_rounds, mcp_servers, response_store, responses_endpoint
from tokenloom.services.gateway.tenants import tenant as tenant_limits
from tokenloom.services.runtime.host import limits
from tokenloom.supervisor import part, ports

from .markdown_page import ROOT
from .stated_defaults import defaults_of_the_code

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_THINGS = "tests|flags|metrics|alerts|architectures|routes|checkpoints|libraries|RPCs|options|modules"
COUNTED = re.compile(rf"(?:\b\d[\d,]*|\b(?:{'|'.join(_WORDS[2:])})) (?:{_THINGS})\b")
"""Counts of what changes with the code, such as "200 flags"."""

_EPLB = EplbConfig()
_SPECULATION = SpeculativeConfig("ngram")
_ALERTS = (ROOT / "observability" / "prometheus" / "alerts.yml").read_text()
_CERTIFICATE_ALERTS = len(re.findall(r"alert: TokenloomCertificate", _ALERTS))
_DEMO_BYTES, _PICTURE_BYTES = (
    sum(path.stat().st_size for path in model.iterdir() if path.is_file()) for model in PACKAGED.values()
)


def _kib(number: int) -> str:
    return f"{number >> 10:,} KiB"


def _default(flag: str) -> str:
    (default,) = defaults_of_the_code()[flag]
    return default


SENTENCES = {
    "README.md": [
        f"The demo model ships with the repository ({_DEMO_BYTES / 1e6:.1f} MB), "
        f"and so does the picture model ({_PICTURE_BYTES / 1e6:.1f} MB)"
    ],
    "docs/operate/security.md": [
        f"| files of images, videos and sounds, in a gateway | bytes | {encoder_client.MAX_PUTS} to each encoder |",
        f"{_WORDS[_CERTIFICATE_ALERTS]} alerts warn",
        f"A body above {_kib(request_body.OFF_LOOP_BYTES)} is counted before any of it is built: it may hold "
        f"{large_json.MAX_CONTAINERS:,} objects and arrays, {large_json.MAX_STRINGS:,} strings and "
        f"{large_json.MAX_NUMBERS:,} values",
        f"A gRPC message above {_kib(limits.LARGE_BYTES)} may have {limits.MAX_FIELDS:,} fields, and a "
        f"chat over gRPC {chat_prompt.MAX_MESSAGES:,} messages",
        f"{validation.MAX_STOP_STRINGS} stop strings, {sampling_params.MAX_LOGIT_BIASES:,} tokens in `logit_bias`, "
        f"{tool_request.MAX_TOOLS} tools, {admission.MAX_PROMPTS:,} prompts",
        f"written in pieces of {_kib(pieces.PIECE_BYTES)}",
        f"may each have {_kib(http_protocol.MAX_HEAD_BYTES)} and {http_protocol.MAX_FIELDS} fields and take "
        f"{http_protocol.HEAD_SECONDS:.0f} s; a body may take {request_body.BODY_SECONDS:.0f} s",
        f"| `--tenant-sessions` | {tenant_limits.SHARED_SESSIONS} | open streams of `GenerateSession`, idle ones too; "
        f"a gateway has {tenant_limits.MAX_SESSIONS:,} |",
        f"| `--tenant-pending-grammars` | {tenant_limits.SHARED_GRAMMARS} |",
        f"| `--tenant-token-burst` | the tokens of {tenant_limits.BURST_SECONDS} s |",
    ],
    "docs/operate/kubernetes.md": [
        f"when it has not renewed the Lease for {lease.GIVE_UP_SECONDS} s",
        f"no active coordinator after {lease.GIVE_UP_SECONDS} s",
    ],
    "docs/operate/scaling.md": [
        f"| `window_size` | {_EPLB.window_size} |",
        f"| `step_interval` | {_EPLB.step_interval} |",
        f"| `num_redundant_experts` | {_EPLB.num_redundant_experts} |",
        f"| `log_balancedness` | {str(_EPLB.log_balancedness).lower()} |",
        f"| `move_bytes` | {_EPLB.move_bytes >> 20} MiB |",
    ],
    "docs/operate/operations.md": [
        f"connections wait in the backlog ({ports.BACKLOG:,} for each port",
        f"at most {_WORDS[part.MAX_PREDECESSORS]} processes of one gateway drain at the same time",
        f"shows the last {recent_requests.MAX_RECENT} under `GET /requests`",
    ],
    "docs/operate/on-call.md": [f"the last {recent_requests.MAX_RECENT} requests of a gateway"],
    "docs/reference/features.md": [
        f"a request head or trailers take longer than {http_protocol.HEAD_SECONDS:.0f} s, or a body longer than "
        f"{request_body.BODY_SECONDS:.0f} s",
        f"heads and trailers above {_kib(http_protocol.MAX_HEAD_BYTES)} or {http_protocol.MAX_FIELDS} fields",
        f"n: at most {sampling_params.MAX_SAMPLES} per prompt and {validation.MAX_OUTPUTS:,} outputs per request",
        f"constraints above {output_constraints.MAX_SOURCE_BYTES >> 10} KB, {output_constraints.MAX_DEPTH} levels, or "
        f"{output_constraints.MAX_ENUM:,} enum values or choices",
        f"Of a body above {_kib(request_body.OFF_LOOP_BYTES)}, one unknown field is named",
    ],
    "docs/use/adapters.md": [
        f"A name has 1 to {adapter_name.MAX_NAME} letters",
        f"At most {usage_counts.MAX_ADAPTERS:,} adapters have series of their own",
    ],
    "docs/use/batches.md": [
        f"at least every {batch_run.LONGEST_WAIT:.0f} s",
        f"A tenant may have {batch_store.MAX_OPEN} batches that have not ended. Of batches that have ended the latest "
        f"{batch_store.MAX_KEPT:,} are listed",
    ],
    "docs/use/clients.md": [
        f"The gRPC port is by default {ports.GRPC_OFFSET:,} above",
        f"At most {response_store.MAX_RUNNING} responses run in the background",
        f"keeps the list for {mcp_servers.KEPT_SECONDS:.0f} s",
        f"for {mcp_rounds.MAX_ROUNDS} rounds and {mcp_servers.MAX_CALLS} calls",
        f"at most {mcp_servers.MAX_OPEN} are open, which",
        f"within {charge.KEPT_SECONDS:.0f} s of the end",
        f"whose request is larger than {responses_endpoint.MAX_RECIPE_BYTES >> 20} MiB",
    ],
    "docs/use/embeddings.md": [
        f"a call has at most {pooling_input.MAX_INPUTS:,} inputs",
        f"A call keeps at most {running_pooling.MOST_AT_ONCE} of its prompts in work",
    ],
    "docs/use/page.md": [f"The gateway keeps {traffic.NUM_INTERVALS} intervals of {traffic.INTERVAL_SECONDS:.0f} s"],
    "docs/start/concepts.md": [
        f"keys and values of {_default('--block-size')} tokens",
        f"*lease* ({float(_default('--kv-lease-seconds')):.0f} s unless renewed)",
    ],
    "docs/use/two-machines.md": [f"Prompts of fewer than {_default('--pd-threshold')} uncached tokens"],
    "docs/use/speculation.md": [
        f"| `num_speculative_tokens` | 1 to 32, by default {_SPECULATION.num_speculative_tokens} |",
        f"| by default {_SPECULATION.prompt_lookup_min} and {_SPECULATION.prompt_lookup_max} |",
        f"A request whose last {draft_history.WINDOW} drafts were right in fewer than one of four gets no further ones "
        f"for {draft_history.PROBE_TOKENS} tokens",
    ],
}
"""By page: sentences, or parts of them, that stand there. A number that changes in the code changes the sentence."""
