"""Checks that ``config.json`` is that of a language model which can be served."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.gpu_worker.checkpoint.supported import ARCHITECTURES, BUILT_IN, QUANTIZATION_METHODS

from .small_files import CannotServe, read_object

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_TASKS = {
    "ForConditionalGeneration": "it reads images or sound, or has an encoder",
    "ForSequenceClassification": "it classifies texts",
    "ForTokenClassification": "it classifies tokens",
    "ForQuestionAnswering": "it marks answers in texts",
    "ForMaskedLM": "it is an encoder that fills gaps",
    "ForImageClassification": "it classifies images",
    "ForSpeechSeq2Seq": "it writes down speech",
    "EncoderModel": "it is an encoder",
    "Model": "it has no head for text, so it only computes embeddings",
}
"""What classes with such names are for, the longer endings first."""
_ANOTHER = "serve a model whose class ends in ForCausalLM (docs/reference/models.md)"
_INSTALL = "pip install 'tokenloom[transformers]'"


def check_config(path: Path, model_impl: str = "auto") -> dict[str, Any]:
    """Return the content of the ``config.json`` in a checkpoint directory.

    ``model_impl`` is the option of that name. Raises `CannotServe` for a model that no installed code computes.
    """
    file = path / "config.json"
    config = read_object(file)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CannotServe(
            f"{file} does not name the model's class: set architectures, for example to "
            f'["{_guessed_class(config)}"], as in the model\'s original checkpoint'
        )
    _check_architecture(file, names[0], config, model_impl)
    _check_quantization(file, config)
    return config


def _check_architecture(file: Path, name: str, config: dict[str, Any], model_impl: str) -> None:
    if name in BUILT_IN and model_impl != "transformers":
        return
    known = _classes_of_transformers()
    if name in known and model_impl != "native":
        return
    if config.get("is_encoder_decoder") is True:
        raise CannotServe(f"{file}: {name} has an encoder and a decoder, which is not supported: {_ANOTHER}")
    if not name.endswith(_CAUSAL) and name not in known:
        purpose = next((text for ending, text in _OTHER_TASKS.items() if name.endswith(ending)), "it writes no text")
        raise CannotServe(f"{file}: {name} cannot be served ({purpose}): {_ANOTHER}")
    if model_impl == "native":
        raise CannotServe(
            f"{file}: {name} is not built in: leave out --model-impl native, or see docs/reference/models.md"
        )
    if config.get("auto_map"):
        raise CannotServe(
            f"{file}: the code of {name} is in the checkpoint (auto_map) and is never run: use a model of "
            "docs/reference/models.md"
        )
    if not known:
        raise CannotServe(f"{file}: {name} is computed by the package transformers: {_INSTALL}")
    raise CannotServe(
        f"{file}: neither Tokenloom nor the installed transformers has {name}: use a model of "
        "docs/reference/models.md, or install a newer transformers if that has the class"
    )


def _check_quantization(file: Path, config: dict[str, Any]) -> None:
    entry = config.get("quantization_config")
    if entry is None and isinstance(config.get("quantization"), dict):
        raise CannotServe(
            f"{file}: the weights are quantized by MLX (quantization), which is not read: use the model's unquantized "
            "checkpoint or its GGUF file"
        )
    if not entry:
        return
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if method not in QUANTIZATION_METHODS:
        raise CannotServe(
            f"{file}: quantization_config: the method {method!r} is not supported ({', '.join(QUANTIZATION_METHODS)} "
            "are): use the model's unquantized checkpoint, with --quantization int8-dynamic or int4, or its GGUF file"
        )


def _classes_of_transformers() -> frozenset[str]:
    """Return the causal language models of the installed transformers, which importing would take seconds; empty: it is
    not installed."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    if not source.is_file():
        return frozenset()
    table = source.read_text(encoding="utf-8").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    return frozenset(re.findall(r'"([A-Z]\w+)"', table))


def _guessed_class(config: dict[str, Any]) -> str:
    kind = re.sub(r"\W", "", str(config.get("model_type") or "llama"))
    families = {family: name for name, family in ARCHITECTURES.items()}
    return families.get(kind, f"{kind.capitalize()}ForCausalLM")  # type: ignore[call-overload, no-any-return]


_PLAIN = (None, "default")
"""Types of rotary positions that do not stretch the context."""


def check_context(path: Path, max_model_len: int | None) -> None:
    """Check ``--max-model-len`` for a checkpoint directory; the engine checks it again, for every kind of model.

    Raises `CannotServe` only for what the engine is sure to refuse: positions that are stretched, and GGUF files, pass.
    """
    if max_model_len is None:
        return
    if max_model_len < 2:
        raise CannotServe(
            f"--max-model-len {max_model_len}: give at least 2, because a request has one token of prompt and one of "
            "output"
        )
    if is_gguf(path):
        return
    config = read_object(path / "config.json")
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or any(not _is_plain(rope) for rope in ropes):
        return
    # The engine refuses it as well, but a whole mesh was started for that, and the refusal came after eleven seconds.
    if max_model_len > length:
        raise CannotServe(
            f"--max-model-len {max_model_len}: the model's context has {length} tokens (max_position_embeddings in "
            f"{path / 'config.json'}): give at most that, or leave out the option"
        )


def _is_plain(rope: object) -> bool:
    """Return whether rotary positions are not stretched, as far as is known: entries by layer kind are not read."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return rope.get("rope_type", rope.get("type")) in _PLAIN
