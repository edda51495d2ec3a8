"""Writes the page for users of vLLM: every flag, request field and metric, and what Tokenloom has in its place."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from tokenloom.services.gateway.compat import FOREIGN_APIS
from tokenloom.services.gateway.compat.foreign_field import FieldEffect
from tokenloom.services.runtime.host.foreign_flags import foreign_flags

from .vllm_names import MISSING_ARGUMENTS, OTHER_METRICS, SAME_ARGUMENTS, SAME_FLAGS, SAME_METRICS

_HEAD = """# From vLLM

`make docs` writes the tables of this page from the code, and tests try what they say.

Replace `vllm serve MODEL` by `tokenloom serve MODEL`. The OpenAI API, vLLM's additional request fields, the sampling
parameters, the methods of the offline `LLM` class and the names of the metrics stay. An unknown flag is an error; for
a flag of vLLM in the table below, the error says what to use instead. A request field without effect is named in the
response header `x-tokenloom-ignored`.

| | vLLM | Tokenloom |
|---|---|---|
| start a server | `vllm serve MODEL --port 8000` | `tokenloom serve MODEL --port 8000` |
| several engines | `--data-parallel-size 4` | `--data-parallel-size 4`, or `--engines 4` |
| prefill and decode on two engines | two servers with `--kv-transfer-config`, and a proxy | `--prefill 1 --decode 1` |
| chat on the command line | `vllm chat` | `tokenloom chat` |
| a batch file | `vllm run-batch -i IN -o OUT --model MODEL` | `tokenloom run-batch -i IN -o OUT --model MODEL` |
| measure a server | `vllm bench serve` | `tokenloom bench serve` |
| in Python | `from vllm import LLM, SamplingParams` | `from tokenloom import LLM, SamplingParams` |
| health, metrics | `/health`, `/metrics` on the server's port | the same on the gateway's port |

What differs on purpose:

- A mesh has several processes. `tokenloom ps` lists them, `tokenloom top` shows their load.
- Sampling depends on logits, parameters, seed and position only, so a request that moves to another engine continues
  with the same tokens. The tokens of a seed are not those of vLLM.
- A gateway without API keys serves only clients that reach it under its own name (`--allowed-hosts`).
- A request that would wait too long is refused with 503 and `Retry-After` instead of queued without bound
  ([overload](../operate/operations.md#overload)).
- The gateway logs a line for each request that has ended, without its prompt and outputs. `--no-access-log` turns this
  off.

"""

_FLAGS = """## Flags with the same name and meaning

{names}

The [configuration page](../reference/configuration.md) describes them.

## Arguments of `LLM`

`LLM` takes {arguments} with vLLM's meaning, and the other options of the engine by their names in the
[configuration page](../reference/configuration.md). Any other argument of vLLM's, such as {missing}, is a `TypeError`
that names it.
"""

_OTHER_FLAGS = """
## Flags that have another name, or none

Flags that few write have no row. The error names options with a similar name, if there are any.

| flag of vLLM | instead |
|---|---|
"""

_FIELDS = """## Request fields

Fields that work are described in [HTTP](../reference/http.md). *refused*: status 400, with an error that names the
field. *ignored*: the request succeeds, and the response header `x-tokenloom-ignored` names the field. A test sends each
field to a gateway and compares the outcome with this list.
"""

_METRICS = """## Metrics

These have vLLM's names, labels and meanings:

{same}

These are absent, or have another name:

| metric of vLLM | in Tokenloom |
|---|---|
"""

_OTHERS = """
## From llama.cpp or Ollama

- A GGUF file is a model: `tokenloom serve ./model-Q4_K_M.gguf`. [Models](../reference/models.md) lists the
  architectures that are read from GGUF.
- `llama-server --port 8080 -m FILE` becomes `tokenloom serve FILE --port 8080`; `-c N` becomes `--max-model-len N`, and
  `-np N` becomes `--max-num-seqs N`.
- Clients that use OpenAI's API keep working: change the base URL to `http://127.0.0.1:8000/v1`. Ollama's clients keep
  working with `OLLAMA_HOST=http://127.0.0.1:8000` ([clients](../use/clients.md#ollamas-clients)).
- Chat templates come from the file or from the checkpoint, as there.
- `ollama run` becomes `tokenloom chat`, and `ollama ps` becomes `tokenloom ps`.
"""


def from_vllm() -> str:
    """Return ``docs/start/from-vllm.md``."""
    flags = _flags_of_one_name()
    same = _listed([f"vllm:{name}" for name in SAME_METRICS])
    metrics = "".join(f"| `vllm:{name}` | {text} |\n" for name, text in OTHER_METRICS.items())
    parts = (_HEAD, flags, *_flags(), "\n", _FIELDS, *_fields(), "\n", _METRICS.format(same=same), metrics, _OTHERS)
    return "".join(parts)


def _flags_of_one_name() -> str:
    """Return the part about flags and arguments that both have."""
    head, _, arguments = _FLAGS.partition("`LLM` takes")
    filled = f"`LLM` takes{arguments}".format(arguments=_named(SAME_ARGUMENTS), missing=_named(MISSING_ARGUMENTS))
    return head.format(names=_listed(SAME_FLAGS)) + textwrap.fill(filled, 120, break_on_hyphens=False) + "\n"


def _named(names: Sequence[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _listed(names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) + ".", 120, break_on_hyphens=False)


def _flags() -> Iterator[str]:
    yield _OTHER_FLAGS
    by_answer: dict[str, list[str]] = {}
    for each in foreign_flags():
        by_answer.setdefault(_marked(each.answer), []).extend(each.names)
    for answer, names in by_answer.items():
        yield f"| {' '.join(f'`{name}`' for name in names)} | {_cell(answer)} |\n"


def _fields() -> Iterator[str]:
    for api in FOREIGN_APIS:
        work = [row.name for row in api.fields if row.outcome is FieldEffect.WORKS]
        yield f"\n### {api.name}\n\n`POST {api.path}`. These work:\n\n{_listed(work)}\n"
        others = [row for row in api.fields if row.outcome is not FieldEffect.WORKS]
        if others:
            yield "\n| field | outcome | |\n|---|---|---|\n"
        for row in others:
            yield f"| `{row.name}` | {row.outcome.value} | {_cell(row.note)} |\n"


def _marked(answer: str) -> str:
    """Return an answer with its flags as code."""
    answer = answer.removeprefix("use ")
    return answer if "`" in answer else re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", answer)


def _cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return text.replace("|", "\\|")
