"""Writes ``docs/reference/models.md`` and the table of transformers' types that preflight and engine ask.

``make models-docs`` tries every type with the installed transformers; ``--page-only`` writes the page from the table.
"""

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.parity.reference import MORE_MODELS
from tests.soak.models.releases import try_all_releases
from tests.soak.models.strict_entries import (
    LAYER_KINDS,
    encoder_types,
    paddings,
    strict_kinds,
    strict_rules,
    text_types,
)
from tests.soak.models.tiny_configs import save_tiny
from tests.soak.models.transformers_models import KINDS, Outcome, quiet, refused_entries, sweep
from tokenloom.gguf.gguf_file import GGUF_ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.files.architectures import ARCHITECTURES
from tokenloom.gpu_worker.checkpoint.files.config_reader import HARMLESS
from tokenloom.gpu_worker.checkpoint.files.text_part import WRAPPERS, wrapper_of
from tokenloom.gpu_worker.checkpoint.model_config import QUANTIZATIONS
from tokenloom.gpu_worker.checkpoint.module_types import TYPES_FILE, UNTRIED
from tokenloom.gpu_worker.models.transformers.declared import max_model_len
from tokenloom.gpu_worker.models.transformers.division import divide_stages, plan_lack
from tokenloom.gpu_worker.models.transformers.paged_attention import UnservableModel
from tokenloom.gpu_worker.models.transformers.transformers_model import body_name, known_entries
from tokenloom.gpu_worker.parallel.sharding import RankPlace

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
RELEASES_FILE = Path(__file__).with_name("releases.json")
_MESH_TEST = "tests/e2e/test_more_models.py"

_BEGINNING = """# Models

`make models-docs` writes this page from the code and from a sweep over every causal language model of transformers.
`architectures` in a checkpoint's `config.json` names the class. `--model-impl auto` takes the built-in code where it
exists and has the features that the checkpoint asks for, and transformers' modules otherwise; `native` and
`transformers` choose one of them. A model that cannot be served is refused with the reason before a process starts:
`tokenloom serve`, `tokenloom models --local` and the engine ask one function, which reads the configuration and the
heads of the files, and the table below for the version of transformers that is installed. For another version the
answer is `untried`, and the engine decides when it loads the model.

## Built in

[features.md](features.md) lists what is read of quantized checkpoints, in safetensors and in GGUF files. `fp8` is
computed on GPUs, the other quantizations on CPUs.

| architecture | files | `--quantization` | tests |
|---|---|---|---|
"""

_TEXT_PARTS = """
## The text of models that read images or sound

With `--language-model-only` these classes serve text: the weights of their other parts are not loaded, and requests
with images or sound are refused. The type of `text_config` decides what computes the text, as for a checkpoint of its
own.

"""

_RELEASES = """
## Released checkpoints

No weights of these releases were here. A small random checkpoint with the entries of the published `config.json` was
served and gave the greedy tokens of transformers' own class; where the table names a format, in that one.

| release | served by | how it was tried, or why it is refused |
|---|---|---|
"""

_GGUF = """
## GGUF files

`general.architecture` in a file names the class; where two are listed, its other entries say which. Tensors may be F32,
F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS or MXFP4. A model in several files is named by one
of them, such as `model-00001-of-00003.gguf`. `tests/gpu_worker/checkpoint/gguf` compares each architecture with
transformers, and each type with the package gguf.

| in the file | class | computed by |
|---|---|---|
"""

_SWEEP = """
## Computed by transformers

The modules of the transformers library compute these models, except attention, which uses the paged KV cache
(`pip install "tokenloom[transformers]"`). Their code comes from the installed library, never from the checkpoint. At
load, a self-check compares their logits over the KV cache with those of their own attention. Linear layers and the
experts of a layer are Tokenloom's, so `--quantization` applies.

`python -m tests.soak.models.models_page` made a tiny random checkpoint of each class. Those with "yes" gave the greedy
tokens of transformers' own `generate`, in chunks and in batches. "Built in only": the built-in code serves the model,
the modules do not. "Untried": transformers does not compute its tiny random checkpoint; the engine decides.

Layers that keep a state between tokens (gated delta net, Mamba, short convolutions) are served from slots: see
[concepts](../start/concepts.md). `--max-num-batched-tokens` is then at least `--max-num-seqs` + 64, except for models
whose states do not depend on cuts: LFM2, LFM3, Mamba, Falcon-Mamba and Jamba.
"""


def native_part() -> str:
    """Return the page up to the sweep, which derives from the code alone."""
    over_mesh = {KINDS[kind] for kind in MORE_MODELS}
    rows = []
    for name in sorted(ARCHITECTURES):
        formats = "safetensors, .bin" + (", GGUF" if any(name in each for each in GGUF_ARCHITECTURES.values()) else "")
        tests = "`tests/gpu_worker/models`, `tests/parity`" + (f", `{_MESH_TEST}`" if name in over_mesh else "")
        rows.append(f"| {name} | {formats} | {', '.join(QUANTIZATIONS)} | {tests} |")
    files = []
    for kind, classes in GGUF_ARCHITECTURES.items():
        by = dict.fromkeys("built in" if name in ARCHITECTURES else "transformers" for name in classes)
        files.append(f"| {kind} | {', '.join(classes)} | {', '.join(by)} |")
    wrappers = textwrap.fill(", ".join(sorted(WRAPPERS)) + ".", 120)
    parts = ("\n".join(rows), _GGUF + "\n".join(files), f"{_TEXT_PARTS}{wrappers}")
    return _BEGINNING + "\n".join(parts) + "\n"


def page(table: Mapping[str, Any], releases: Mapping[str, Sequence[str]]) -> str:
    """Return the page for the content of the table, and for what became of releases."""
    rows = (f"| {name} | {by or 'refused'} | {reason.replace('|', '/')} |\n" for name, (by, reason) in releases.items())
    return (
        native_part()
        + _RELEASES
        + "".join(rows)
        + "".join(_sweep_part(version, found) for version, found in sorted(table.items()))
    )


def _sweep_part(version: str, found: Mapping[str, Any]) -> str:
    served = {kind: _served(name, answer) for kind, (name, answer) in found["types"].items()}
    counts = [list(served.values()).count(word) for word in ("yes", "refused")]
    lines = [
        f"{_SWEEP}\ntransformers {version}, PyTorch {found['torch']}: {counts[0]} types served, {counts[1]} refused.\n",
        "| architecture | model type | served | reason |\n|---|---|---|---|",
    ]
    for kind, (name, answer) in sorted(found["types"].items(), key=lambda item: (item[1][0], item[0])):
        reasons = [] if answer == UNTRIED else [answer] if answer else []
        if not answer and wrapper_of({"architectures": [name]}):
            reasons.append("its text alone, with --language-model-only")
        reasons += [
            f"{entry} = {json.dumps(value)}: {reason}" for entry, value, reason in found["unless"].get(kind, [])
        ]
        lines.append(f"| {name} | {kind} | {served[kind]} | {'; '.join(reasons).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _served(name: str, answer: str) -> str:
    if not answer:
        return "yes"
    return UNTRIED if answer == UNTRIED else "built in only" if name in ARCHITECTURES else "refused"


def reason_of(outcome: Outcome) -> str:
    """Return what the table holds for an outcome: empty if the model is served. The reason completes "the model …"."""
    if outcome.verdict != "refused":
        return {"identical": "", "no reference": UNTRIED}[outcome.verdict]
    text = re.sub(r"^.*?\w+ is not supported: (it )?", "", outcome.reason)
    text = re.sub(r"\S*/config\.json: ", "", text).strip()
    text = re.sub(r"differ from transformers' own by \S+, more than \S+: ", "differ from transformers' own: ", text)
    return text if len(text) <= 160 else f"{text[:157]}..."


def known(kind: str) -> list[str]:
    """Return the entries by which a type's class computes."""
    names = known_entries(CONFIG_MAPPING[kind]) - known_entries(transformers.PreTrainedConfig)
    return sorted(names - HARMLESS)


def lengths(kinds: Iterable[str]) -> dict[str, int]:
    """Return the contexts of types by default, where no rotary embedding stretches them."""
    texts = {kind: CONFIG_MAPPING[kind]().get_text_config(decoder=True) for kind in kinds}
    return {kind: max_model_len(text) for kind, text in texts.items() if not _is_stretched(text)}


def _is_stretched(text: Any) -> bool:
    ropes = getattr(text, "rope_parameters", None) or {}
    return any(
        rope.get("rope_type", "default") != "default" for rope in (ropes, *ropes.values()) if isinstance(rope, dict)
    )


def try_all(directory: Path) -> dict[str, Any]:
    """Return the table of the installed transformers, after trying every type of it. Exits with 1 if one is wrong."""
    tried = try_kinds(list(KINDS), directory)
    return tried | read_all({kind: reason for kind, (_, reason) in tried["types"].items()})


def try_kinds(kinds: Sequence[str], directory: Path) -> dict[str, Any]:
    """Return what the table holds of types that are tried. Exits with 1 if one is wrong."""
    outcomes = sweep(kinds, directory)
    if wrong := [kind for kind, outcome in outcomes.items() if outcome.verdict == "wrong"]:
        sys.exit(f"wrong: {', '.join(wrong)}")
    served = [kind for kind, outcome in outcomes.items() if outcome.verdict == "identical"]
    answers = {kind: reason_of(outcome) for kind, outcome in sorted(outcomes.items())}
    unless = {
        kind: [[name, value, reason_of(Outcome("refused", reason))] for name, value, reason in found]
        for kind in served
        if (found := list(refused_entries(kind, directory)))
    }
    return {
        "torch": torch.__version__.partition("+")[0],
        "types": {kind: [KINDS[kind], reason] for kind, reason in answers.items()},
        "unless": unless,
        "states": {kind: chunk for kind in served if (chunk := outcomes[kind].state_chunk)},
        "staged": [kind for kind in served if not outcomes[kind].state_chunk and has_stages(kind, directory)],
    }


def read_all(answers: Mapping[str, str]) -> dict[str, Any]:
    """Return what the table holds that is read from transformers' classes. ``answers``: of all types."""
    return {
        "values": {
            "activation": sorted(ACT2FN),
            # Under its older name transformers reads long rope too.
            "rope_type": sorted(("default", "su", *ROPE_INIT_FUNCTIONS)),
            "layer_types": LAYER_KINDS,
            "dtype": sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        },
        "entries": {kind: known(kind) for kind, name in sorted(KINDS.items()) if name in ARCHITECTURES},
        **strict_sections(answers),
    }


def strict_sections(answers: Mapping[str, str]) -> dict[str, Any]:
    """Return the contexts of the types that transformers' modules may compute, and what their classes refuse.

    ``answers``: those of all types, as the table holds them.
    """
    modules = [kind for kind, answer in answers.items() if answer in ("", UNTRIED)]
    kinds = sorted({*encoder_types(), *modules, *text_types(modules)})
    served = [kind for kind, answer in answers.items() if not answer]
    return {
        "lengths": lengths(sorted({*served, *encoder_types()})),
        "paddings": paddings(encoder_types()),
        "strict": {kind: strict_kinds(kind) for kind in kinds},
        "rules": strict_rules(kinds),
        **plans(served),
    }


def plans(kinds: Iterable[str]) -> dict[str, Any]:
    """Return which types have a plan by which modules are divided among workers, as their configurations say, with the
    entries that the number of workers must divide."""
    texts = {kind: CONFIG_MAPPING[kind]().get_text_config(decoder=True) for kind in sorted(kinds)}
    divided = {kind: text.base_model_tp_plan or {} for kind, text in texts.items()}
    return {"divided": {kind: _divisible(plan) for kind, plan in divided.items() if not plan_lack(plan)}}


def has_stages(kind: str, directory: Path) -> bool:
    """Return whether the modules of a type that is served are divided among stages."""
    with torch.inference_mode():
        _, model = save_tiny(kind, directory)
        try:
            body, size = getattr(model, body_name(model)), model.config.get_text_config(decoder=True).hidden_size
            return divide_stages(body, RankPlace(0, 1, 1, 2), size) > 0
        except UnservableModel:
            return False


def _divisible(plan: Mapping[str, str]) -> list[str]:
    # In one of GPT-NeoX's layers are the queries, keys and values of all heads, head by head.
    has_heads = any(
        name.endswith((".k_proj", ".query_key_value")) and style == "colwise" for name, style in plan.items()
    )
    ends = ("mlp.down_proj", "mlp.dense_4h_to_h")
    has_mlp = any(name.endswith(ends) and "rowwise" in style for name, style in plan.items())
    return [*["num_attention_heads", "num_key_value_heads"] * has_heads, *["intermediate_size"] * has_mlp]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-only", action="store_true", help="try nothing: write the page from the tables")
    parser.add_argument("--releases-only", action="store_true", help="try the releases alone")
    chosen = parser.parse_args()
    table = json.loads(TYPES_FILE.read_text(encoding="utf-8"))
    quiet()
    # A folder for each: both write checkpoints under the names of their types.
    with tempfile.TemporaryDirectory(prefix="tl-") as directory, tempfile.TemporaryDirectory(prefix="tl-") as another:
        if not chosen.page_only and not chosen.releases_only:
            table[transformers.__version__] = try_all(Path(another))
            TYPES_FILE.write_text(written(table), encoding="utf-8")
        if not chosen.page_only:
            RELEASES_FILE.write_text(written({"releases": try_all_releases(Path(directory))}), encoding="utf-8")
    PAGE.write_text(page(table, json.loads(RELEASES_FILE.read_text(encoding="utf-8"))["releases"]))


def written(table: Mapping[str, Any]) -> str:
    """Return the table as it is kept: JSON with a line for each type."""
    versions = (
        f" {json.dumps(version)}: {_object(2, map(_section, found.items()))}" for version, found in table.items()
    )
    return f"{_object(0, versions)}\n"


def _section(item: tuple[str, Any]) -> str:
    name, content = item
    if isinstance(content, dict):
        rows = (f"   {json.dumps(key)}: {json.dumps(each)}" for key, each in content.items())
        return f"  {json.dumps(name)}: {_object(3, rows)}"
    return f"  {json.dumps(name)}: {json.dumps(content)}"


def _object(indent: int, members: Iterable[str]) -> str:
    return "{\n" + ",\n".join(members) + "\n" + " " * max(indent - 1, 0) + "}"


if __name__ == "__main__":
    main()
