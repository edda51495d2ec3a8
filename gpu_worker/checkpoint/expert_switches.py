"""Describes and reads the experts of a model whose layers choose some of many MLPs for each token."""

from dataclasses import dataclass

from .files.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSwitches:
    """Holds what only layers with experts know."""

    count: int
    per_token: int
    """How many experts compute each token."""
    intermediate_size: int
    shared_size: int = 0
    """The intermediate size of the expert that computes every token; 0: none."""
    normalizes_weights: bool
    """Whether the weights of a token's experts add up to one."""
    layers: tuple[bool, ...]
    """[num_layers]: whether the layer has experts, and not one MLP."""
    own: range | None = None
    """The places of the experts that this rank holds whole; None: its part of all of them. Place i has expert i, unless
    experts are moved by their load."""
    num_redundant: int = 0
    """Places on all ranks beside one for each expert."""

    @property
    def num_places(self) -> int:
        """Return for how many experts the ranks have places."""
        return self.count + self.num_redundant


def read_experts(reader: ConfigReader, family: str, num_layers: int, intermediate_size: int) -> ExpertSwitches | None:
    """Return the experts of ``family``; None: it has none. Raises ``ValueError`` naming an entry that is wrong."""
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return None
    for training_only in ("router_aux_loss_coef", "router_jitter_noise"):
        reader.take(training_only)
    if family == "mixtral":
        experts = ExpertSwitches(
            count=reader.take_int("num_local_experts", 8),
            per_token=reader.take_int("num_experts_per_tok", 2),
            intermediate_size=intermediate_size,
            normalizes_weights=True,
            layers=(True,) * num_layers,
        )
    else:
        experts = _read_qwen(reader, family, num_layers)
    if experts.per_token > experts.count:
        raise reader.error("num_experts_per_tok", f"must be at most the number of experts, {experts.count}")
    return experts


def _read_qwen(reader: ConfigReader, family: str, num_layers: int) -> ExpertSwitches:
    is_2, older_count = family == "qwen2_moe", reader.take("num_local_experts")
    count = reader.take_int("num_experts") if older_count is None else reader.take_int("num_local_experts")
    step, dense = reader.take_int("decoder_sparse_step", 1), reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise reader.error("mlp_only_layers", "must be a list of layer numbers")
    return ExpertSwitches(
        count=count,
        per_token=reader.take_int("num_experts_per_tok", 4 if is_2 else 8),
        intermediate_size=reader.take_int("moe_intermediate_size", 1408 if is_2 else 768),
        shared_size=reader.take_int("shared_expert_intermediate_size", 5632) if is_2 else 0,
        normalizes_weights=reader.take_bool("norm_topk_prob", False),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
