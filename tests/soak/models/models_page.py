"""Writes ``docs/reference/models.md``: which code computes which architecture, from the code and from a sweep."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import transformers

from tests.parity.reference import MORE_MODELS
from tests.soak.models.transformers_models import KINDS, Outcome, quiet, sweep
from tokenloom.gguf.gguf_file import GGUF_ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.files.supported import ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.model_config import QUANTIZATIONS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
_MESH_TEST = "tests/e2e/test_more_models.py"
_SWEEP_MARK = "## Computed by transformers\n"

_BEGINNING = """# Models

`make models-docs` writes this page from the code and from a sweep over every causal language model of transformers.
`architectures` in a checkpoint's `config.json` names the class. `--model-impl auto` takes the built-in code where it
exists and has the features that the checkpoint asks for, and transformers' modules otherwise; `native` and
`transformers` choose one of them. A model that cannot be served is refused at start-up with the reason.

## Built in

[features.md](features.md) lists what is read of quantized checkpoints, in safetensors and in GGUF files. `fp8` is
computed on GPUs, the other quantizations on CPUs.

| architecture | files | `--quantization` | tests |
|---|---|---|---|
"""

_SWEEP = """
The modules of the transformers library compute these models, except attention, which uses the paged KV cache
(`pip install "tokenloom[transformers]"`). Their code comes from the installed library, never from the checkpoint. At
load, a self-check compares their logits over the KV cache with those of their own attention. Linear layers and the
experts of a layer are Tokenloom's, so `--quantization` applies; quantized checkpoint files are refused.

`python -m tests.soak.models.transformers_models` made a tiny random checkpoint of each class. Those with "yes" gave the
greedy tokens of transformers' own `generate`, in chunks and in batches. "Built in only": the built-in code serves the
model, the modules do not.
"""


def native_part() -> str:
    """Return the page up to the sweep, which derives from the code alone."""
    over_mesh = {KINDS[kind] for kind in MORE_MODELS}
    rows = []
    for name in sorted(ARCHITECTURES):
        formats = "safetensors, .bin" + (", GGUF" if name in GGUF_ARCHITECTURES.values() else "")
        tests = "`tests/gpu_worker/models`, `tests/parity`" + (f", `{_MESH_TEST}`" if name in over_mesh else "")
        rows.append(f"| {name} | {formats} | {', '.join(QUANTIZATIONS)} | {tests} |")
    return _BEGINNING + "\n".join(rows) + "\n"


def sweep_part(outcomes: dict[str, Outcome]) -> str:
    """Return the rest of the page for the outcomes of model types."""
    served = {kind: _served(kind, outcome) for kind, outcome in outcomes.items()}
    counts = [list(served.values()).count(word) for word in ("yes", "refused")]
    lines = [
        _SWEEP_MARK + _SWEEP,
        f"transformers {transformers.__version__}: {counts[0]} types served, {counts[1]} refused.\n",
        "| architecture | model type | served | reason |\n|---|---|---|---|",
    ]
    for kind, outcome in sorted(outcomes.items(), key=lambda item: (KINDS[item[0]], item[0])):
        lines.append(f"| {KINDS[kind]} | {kind} | {served[kind]} | {_reason(outcome)} |")
    return "\n".join(lines) + "\n"


def _served(kind: str, outcome: Outcome) -> str:
    if outcome.verdict == "refused" and KINDS[kind] in ARCHITECTURES:
        return "built in only"
    return {"identical": "yes", "refused": "refused", "wrong": "WRONG", "no reference": "not tried"}[outcome.verdict]


def _reason(outcome: Outcome) -> str:
    """Return the reason without the path of the temporary checkpoint."""
    begin = (
        "transformers does not compute its tiny random checkpoint here: " if outcome.verdict == "no reference" else ""
    )
    text = re.sub(r"^.*?config\.json: \w+ is not supported: ", "", outcome.reason)
    text = re.sub(r"differ from transformers' own by \S+, more than \S+: ", "differ from transformers' own: ", text)
    text = re.sub(r"\S*/config\.json: ", "", text).replace("|", "/")
    text = begin + text.strip()
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native-only", action="store_true", help="keep the rows of the last sweep")
    if parser.parse_args().native_only:
        rest = _SWEEP_MARK + PAGE.read_text().split(_SWEEP_MARK, 1)[1]
    else:
        quiet()
        with tempfile.TemporaryDirectory(prefix="tl-") as directory:
            outcomes = sweep(list(KINDS), Path(directory))
        rest = sweep_part(outcomes)
    PAGE.write_text(f"{native_part()}\n{rest}")
    sys.exit(1 if "| WRONG |" in rest else 0)


if __name__ == "__main__":
    main()
