"""Reads the configurations of heads that draft, and says which models heads and draft models draft for. It does not
import torch: the checks before a start ask the same."""

from pathlib import Path
from typing import NamedTuple

from .files.architectures import LEARNED_POSITIONS
from .files.config_reader import ConfigReader
from .load_config import read_layer
from .model_config import DtypeName, ModelConfig

_FIELD = "speculative_config.model"


class DraftedModel(NamedTuple):
    """Holds what the files of a model that transformers' modules compute say about drafts for it. None: that is left
    to the defaults of its class, and the engine compares it."""

    family: str
    dtype_name: DtypeName
    vocab_size: int | None
    hidden_size: int | None
    max_model_len: int | None


def check_draft(draft: ModelConfig, target: ModelConfig | DraftedModel) -> None:
    """Raise ``ValueError`` naming what keeps ``draft`` from drafting for ``target``."""
    if target.vocab_size is not None and draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{_FIELD}: its vocabulary has {draft.vocab_size} tokens and the model's {target.vocab_size}; they must be "
            "the same"
        )
    if target.max_model_len is not None and draft.max_model_len < target.max_model_len:
        raise ValueError(
            f"{_FIELD}: its context has {draft.max_model_len} tokens and the model's {target.max_model_len}; it must "
            "not be shorter"
        )
    check_draft_dtype(draft, target)


def check_draft_dtype(draft: ModelConfig, target: ModelConfig | DraftedModel) -> None:
    """Raise ``ValueError`` if what drafts is computed in another dtype."""
    if draft.dtype_name != target.dtype_name:
        raise ValueError(f"{_FIELD}: its dtype is {draft.dtype_name} and the model's {target.dtype_name}; set dtype")


def check_head(head: ModelConfig, target: ModelConfig | DraftedModel) -> None:
    """Raise ``ValueError`` naming what keeps an EAGLE head from drafting for ``target``."""
    if target.family in LEARNED_POSITIONS:
        raise ValueError(f"{_FIELD}: EAGLE heads do not draft for models of the family {target.family}")
    if target.hidden_size is not None and (head.hidden_size != target.hidden_size or head.num_layers != 1):
        raise ValueError(
            f"{_FIELD}: the head has {head.num_layers} layers of size {head.hidden_size}; it needs one of the model's "
            f"size, {target.hidden_size}"
        )


def refuse_modules(name: str) -> ValueError:
    """Return the error about a draft model that no built-in decoder computes."""
    return ValueError(f"{_FIELD}: {name} needs transformers' modules or is an encoder; only built-in decoders draft")


def refuse_states(name: str) -> ValueError:
    """Return the error about a draft model whose layers keep a state."""
    return ValueError(f"{_FIELD}: layers of {name} keep a state between tokens; it cannot draft")


class MtpNames(NamedTuple):
    """Holds what the checkpoints of a family call the parts of the head that they bring (multi-token prediction)."""

    joins: str
    """The layer that joins a token and the state before it."""
    of_token: str
    of_state: str
    layer: str
    norm: str
    """The norm before the output layer, which is the model's."""
    keeps_normed: bool
    """Whether further drafts begin with the state after that norm."""


def mtp_names(config: ModelConfig | None) -> MtpNames:
    """Return the names of the head of a whole model; None: no built-in decoder computes it. Raises ``ValueError`` if it
    has no head that drafts."""
    if config is not None and config.family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        token, state = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MtpNames("mtp.fc", token, state, "mtp.layers.0", "mtp.norm", keeps_normed=True)
    if config is not None and config.family == "deepseek_v3" and config.num_further_layers:
        layer = f"model.layers.{config.num_layers}"
        joins, token, state, norm = (f"{layer}.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
        return MtpNames(joins, token, state, layer, norm, keeps_normed=False)
    raise ValueError(
        "speculative_config: the method mtp is for Qwen3-Next, Qwen3.5 and checkpoints of DeepSeek-V3 that bring a "
        "head, computed with built-in layers; choose ngram, suffix, draft_model or eagle"
    )


class Eagle3Entries(NamedTuple):
    """Holds what the configuration of an EAGLE-3 head says."""

    config: ModelConfig
    """Of its layer; ``vocab_size`` is that of the model."""
    num_outputs: int
    """Tokens that it may draft."""
    layers: tuple[int, ...] | None
    """The layers of the model whose inputs it reads; None: those of :meth:`layers_of`."""
    norms_residual: bool
    """Whether the residual stream of its layer begins with the state after its norm."""

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the layers of ``target`` whose inputs the head reads. Raises ``ValueError`` if it lacks some, or if
        the head is of another model."""
        count, config = target.layers_of_model or target.num_layers, self.config
        layers = self.layers or (2, count // 2, count - 3)
        if len(layers) < 2 or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
            raise ValueError(
                f"speculative_config.model: the head reads the inputs of the layers {list(layers)}: they must be at "
                f"least two different ones in order, of the model's {count} (eagle_aux_hidden_state_layer_ids)"
            )
        if target.mixer is not None or target.family in (*LEARNED_POSITIONS, "transformers"):
            raise ValueError(
                "speculative_config: the method eagle3 does not draft for models of the family "
                f"{target.family}; choose ngram, suffix or draft_model"
            )
        for name in ("hidden_size", "vocab_size"):
            if (own := getattr(config, name)) != (wanted := getattr(target, name)):
                raise ValueError(
                    f"speculative_config.model: {name} of the head is {own}; it must be the model's {wanted}"
                )
        return layers


_EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(path: Path, dtype: str = "auto") -> Eagle3Entries:
    """Read the configuration of the EAGLE-3 head in a directory; ``dtype`` as in :func:`load_model_config`. Raises
    ``ValueError`` naming what is wrong or not supported."""
    reader = ConfigReader.open(path)
    names = reader.take("architectures")
    if not isinstance(names, list) or not names or names[0] not in _EAGLE3_CLASSES:
        raise reader.error(
            "architectures", f"is not that of an EAGLE-3 head: must be one of {', '.join(_EAGLE3_CLASSES)}"
        )
    config = read_layer(reader, path, dtype)
    if config.num_layers != 1:
        raise reader.error("num_hidden_layers", "must be 1: an EAGLE-3 head has one layer")
    if reader.take_int("target_hidden_size", config.hidden_size) != config.hidden_size:
        raise reader.error("target_hidden_size", f"must be hidden_size = {config.hidden_size}")
    more = reader.take("eagle_config") or {}
    if not isinstance(more, dict) or more.keys() - {_EAGLE3_LAYERS, "use_aux_hidden_state"}:
        raise reader.error("eagle_config", f"must be an object with {_EAGLE3_LAYERS} alone")
    if more.get("use_aux_hidden_state", True) is not True:
        raise reader.error("eagle_config.use_aux_hidden_state", "must be true: an EAGLE-3 head reads several layers")
    layers = reader.take(_EAGLE3_LAYERS) or more.get(_EAGLE3_LAYERS)
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise reader.error(_EAGLE3_LAYERS, "must be a list of integers")
    outputs = reader.take_int("draft_vocab_size", config.vocab_size)
    norms = reader.take_bool("norm_before_residual", False)
    reader.refuse_rest()
    return Eagle3Entries(config, outputs, None if layers is None else tuple(layers), norms)
