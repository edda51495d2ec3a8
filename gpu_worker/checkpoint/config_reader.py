"""Reading a checkpoint's ``config.json`` so that nothing in it goes unnoticed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Training, generation defaults (generation_config.json is read elsewhere), bookkeeping: none changes a forward pass.
_HARMLESS_NAMES = """
    architectures model_type auto_map dtype torch_dtype transformers_version name_or_path use_cache return_dict
    output_attentions output_hidden_states output_scores torchscript use_bfloat16 gradient_checkpointing
    initializer_range pretraining_tp is_decoder attention_dropout embd_pdrop resid_pdrop attn_pdrop
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences chunk_size_feed_forward suppress_tokens begin_suppress_tokens remove_invalid_values
    exponential_decay_length_penalty return_dict_in_generate tie_encoder_decoder n_ctx reorder_and_upcast_attn
    max_sequence_length is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


class ConfigReader:
    """A JSON object whose every entry must be either taken, known to be harmless, or off.

    A model that is loaded with a feature left out answers nonsense without an error, so what no one has asked for by
    :meth:`refuse_rest` is refused by name.
    """

    def __init__(self, values: Mapping[str, Any], where: str, harmless: frozenset[str] = frozenset()) -> None:
        self._values = dict(values)
        self._where = where
        self._harmless = harmless
        self._taken: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> "ConfigReader":
        """Reads a checkpoint directory's ``config.json``. Raises ``ValueError`` if there is none or it is no object."""
        path = directory / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{directory} has no config.json: not a Hugging Face checkpoint directory") from None
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object")
        return cls(values, "config.json", _HARMLESS)

    def take(self, name: str, default: Any = None) -> Any:
        """The raw value, or ``default`` where the entry is absent (a null stays None)."""
        self._taken.add(name)
        return self._values.get(name, default)

    def take_int(self, name: str, default: int | None = None) -> int:
        """A positive integer; absent or null: ``default``, and an error if that is None too."""
        value = self.take(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "must be a positive integer")
        return value

    def take_float(self, name: str, default: float | None = None) -> float:
        """A positive number; absent or null: ``default``, and an error if that is None too."""
        value = self.take(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "must be a positive number")
        return float(value)

    def take_bool(self, name: str, default: bool) -> bool:
        """A boolean; absent or null: ``default``."""
        value = self.take(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value

    def take_object(self, name: str) -> "ConfigReader | None":
        """A nested object with its own accounting, or None where it is absent, null or empty."""
        value = self.take(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return ConfigReader(value, f"{self._where}: {name}")

    def refuse_rest(self) -> None:
        """Raises ``ValueError`` naming the entries that nobody took, unless they are harmless, private or off."""
        rest = self._values.keys() - self._taken - self._harmless
        unknown = sorted(name for name in rest if not name.startswith("_") and not _is_off(self._values[name]))
        if unknown:
            features = ", ".join(f"{name} = {_brief(self._values[name])}" for name in unknown)
            raise ValueError(f"{self._where}: not supported: {features}")

    def error(self, name: str, wanted: str) -> ValueError:
        """The error for an entry with a wrong value."""
        found = _brief(self._values[name]) if name in self._values else "nothing"
        return ValueError(f"{self._where}: {name} {wanted}, found {found}")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
