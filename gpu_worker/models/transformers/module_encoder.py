"""Computes the hidden states of whole prompts with a class of transformers that has no head: encoders, decoders whose
tokens attend to later ones, and decoders that are not built in."""

import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ...checkpoint.files.config_reader import is_pickled, read_architecture, read_wrapper, stored_names, weight_files
from ...checkpoint.model_config import DtypeName, as_torch
from ...ops.torch_ops import TorchOps
from ...pooling.class_head import ClassHead
from .declared import max_model_len
from .loading import CausalClass, load_quietly, make_on_meta, read_config, refuse_differences, unknown_class
from .modules import replace_modules

_MOST_PADDING = 1.25
"""Prompts are computed together as long as padding them to one length makes at most so many times their tokens."""
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""How far rounding moves a state, relative to its length."""


@dataclass(frozen=True, slots=True)
class ModuleEncoderConfig:
    """Fulfils :class:`~...encoders.encoder.EncoderShape`."""

    dtype_name: DtypeName
    vocab_size: int
    hidden_size: int
    max_model_len: int
    num_token_types: int
    """0: the model does not distinguish parts."""
    entries: str
    """All entries that the class reads, as JSON."""


def read_module_config(path: Path, dtype: DtypeName) -> ModuleEncoderConfig:
    """Describe the checkpoint directory ``path``. Raises ``ValueError`` naming what cannot be computed."""
    return _describe(_find(path), dtype)


def _find(path: Path) -> CausalClass:
    name, values = read_architecture(path)
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise unknown_class(path, name, values)
    if values.get("quantization_config"):
        raise ValueError(f"{path / 'config.json'}: quantization_config is not supported for embeddings of {name}")
    config = read_config(path, None if read_wrapper(path) is None else values)
    vars(config).pop("quantization_config", None)  # an empty one asks for nothing
    base: Any = found if name.endswith("Model") else MODEL_MAPPING.get(type(config), None)
    if base is None:
        raise ValueError(f"{path / 'config.json'}: transformers has no class of {name} without a head")
    return CausalClass(base, config, name)


def _describe(found: CausalClass, dtype: DtypeName) -> ModuleEncoderConfig:
    config, text = found.config, found.config.get_text_config()
    length = max_model_len(config)
    # Of classes that count positions from the row after that of padding, the table is so much longer.
    positions = getattr(getattr(make_on_meta(found, as_torch(dtype)), "embeddings", None), "position_embeddings", None)
    if isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
        length -= positions.padding_idx + 1
    return ModuleEncoderConfig(
        dtype_name=dtype,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_model_len=length,
        num_token_types=getattr(text, "type_vocab_size", 0),
        entries=json.dumps({**config.to_dict(), "dtype": None, "_name_or_path": None}, sort_keys=True, default=str),
    )


class ModuleEncoder:
    """Fulfils :class:`~...encoders.encoder.EncoderModel`."""

    head: ClassHead | None = None

    def __init__(self, path: Path, dtype: DtypeName, device: torch.device, quantization: str | None) -> None:
        """Load the checkpoint directory ``path``. Raises ``ValueError`` naming what cannot be computed."""
        found = _find(path)
        self.config = _describe(found, dtype)
        self._model = _load(found, path, as_torch(dtype), device, quantization)
        _unify(self._model, as_torch(dtype))
        self._dtype = as_torch(dtype)
        self._device = device
        self._padding = found.config.pad_token_id or 0
        # GPT-2 takes such ids too, but without a table of their own, and sentence-transformers passes none.
        takes_types = "token_type_ids" in inspect.signature(self._model.forward).parameters
        self._has_types = takes_types and self.config.num_token_types > 0
        self._keeps_cache = hasattr(found.config, "use_cache")
        self._most_padding = _MOST_PADDING if self._ignores_padding() else 1.0
        if found.config.get_text_config().to_dict().get("is_causal") is False:
            self._check_looks_ahead(path)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        lengths = [end - begin for begin, end in itertools.pairwise(begins)]
        hidden = torch.empty(len(token_ids), self.config.hidden_size, dtype=self._dtype, device=self._device)
        for rows in _batches(lengths, self._most_padding):
            parts = [slice(begins[row], begins[row + 1]) for row in rows]
            states = self._states([token_ids[part] for part in parts], [token_types[part] for part in parts])
            for part, of_row in zip(parts, states, strict=True):
                hidden[part] = of_row[: part.stop - part.start]
        return hidden

    def _states(self, prompts: Sequence[Tensor], types: Sequence[Tensor]) -> Tensor:
        """Return [R, longest, hidden_size]."""
        ids = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=self._padding)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._has_types:
            padded = nn.utils.rnn.pad_sequence(list(types), batch_first=True)
            inputs["token_type_ids"] = padded.clamp(max=self.config.num_token_types - 1)
        if self._keeps_cache:
            inputs["use_cache"] = False
        states: Tensor = self._model(**inputs).last_hidden_state
        return states

    @torch.inference_mode()
    def _ignores_padding(self) -> bool:
        """Return whether a prompt has the same states beside a longer one: convolutions mix in what follows it."""
        ids = torch.arange(1, 6, device=self._device) % self.config.vocab_size
        types = torch.zeros_like(ids)
        alone = self._states([ids[:4]], [types[:4]])[0].float()
        padded = self._states([ids, ids[:4]], [types, types[:4]])[1, :4].float()
        difference = (padded - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-9)
        return bool(difference.max() < _TOLERANCES[self._dtype])

    @torch.inference_mode()
    def _check_looks_ahead(self, path: Path) -> None:
        """Raise ``ValueError`` if the class ignores that its tokens are to attend to later ones."""
        ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=self._device) % self.config.vocab_size
        first, second = self._states(list(ids), list(torch.zeros_like(ids)))
        if torch.equal(first[0], second[0]):
            raise ValueError(
                f"{path / 'config.json'}: is_causal is false, but the class that transformers has of the model lets no "
                "token attend to later ones"
            )


def _unify(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the parameters that transformers' own modules hold have the model's dtype.

    DeBERTa makes the biases of its queries in float32 whatever the dtype of the model, and then cannot compute.
    """
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def _batches(lengths: Sequence[int], most_padding: float) -> Iterator[list[int]]:
    """Yield the numbers of prompts to compute together, which padding makes at most so many times their tokens."""
    batch: list[int] = []
    total = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[row] * (len(batch) + 1) > most_padding * (total + lengths[row]):
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += lengths[row]
    yield batch


def _load(found: CausalClass, path: Path, dtype: torch.dtype, device: torch.device, quantization: str | None) -> Any:
    files = weight_files(path)
    # With scaled dot products a class that is causal by itself may mask later tokens although it is asked not to.
    attention = "eager" if getattr(found.config, "is_causal", True) is False else None
    try:
        model, report = load_quietly(found, path, dtype, use_safetensors=not is_pickled(files[0]), attention=attention)
    except Exception as error:  # classes check their configurations in many ways
        raise ValueError(
            f"{path / 'config.json'}: transformers cannot load {found.architecture}: {type(error).__name__}: {error}"
        ) from error
    refuse_differences(_without_heads(report, path, found))
    model = model.to(device).eval().requires_grad_(False)
    if quantization is not None:
        with torch.inference_mode():
            replace_modules(model, None, TorchOps(), quantization)
    return model


def _without_heads(report: dict[str, Any], path: Path, found: CausalClass) -> dict[str, Any]:
    """Return the differences that change hidden states: those of poolers and of output layers do not."""
    kept = {kind: [name for name in names if "pooler." not in str(name)] for kind, names in report.items()}
    prefix = f"{found.model.base_model_prefix}."
    if not found.architecture.endswith("Model") and any(name.startswith(prefix) for name in stored_names(path)):
        kept["unexpected_keys"] = [name for name in kept["unexpected_keys"] if str(name).startswith(prefix)]
    kept["unexpected_keys"] = [name for name in kept["unexpected_keys"] if not str(name).endswith("position_ids")]
    return kept
