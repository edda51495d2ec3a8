"""Describes a loaded model, and what its worker released when it fell asleep."""

import msgspec

from .core_params import ModelPooling
from .kv_groups import KVGroup, layers_per_group


class MediaTraits(msgspec.Struct, frozen=True):
    """Describes what a model reads beside text."""

    kinds: tuple[str, ...]
    """``image``, ``audio``, ``video``."""
    levels: int = 1
    """Rows side by side: a row has so many times ``hidden_size`` numbers; the further ones are added after the first
    layers."""
    cross_rows: int = 0
    """Rows of the one item of a prompt that stand beside it: each layer attends to all of them behind its own tokens.
    0: rows stand in the prompt, in the place of tokens."""


class ModelInfo(msgspec.Struct, frozen=True):
    """Describes a loaded model to the core."""

    vocab_size: int
    max_model_len: int
    """The model's own context length, in tokens."""
    kv_bytes_per_token: int
    """For all layers together."""
    kv_layout: str
    """As in ``Fingerprint.kv_layout``: two pools can exchange blocks if it is equal. It includes the block size."""
    numerics: str
    """As in ``Fingerprint.numerics``."""
    hidden_size: int = 0
    """Columns of prompt embeddings."""
    experts_per_token: int = 0
    """Experts that compute a token, over all layers; 0: the model has none, or no worker knows the choices of all."""
    has_experts: bool = False
    """Whether a layer has experts, on whichever worker it is."""
    kv_groups: list[KVGroup] = []
    """The layers by the windows that they see; empty: they share one block table."""
    pooling: ModelPooling = ModelPooling()
    """What requests may pool instead of generating tokens."""
    pool_is_on_host: bool = True
    """Whether the KV pool is memory of the host, which the core allocates if KV moves, or of a device."""
    state_bytes: int = 0
    """Bytes of a slot, which holds the states of all layers after some tokens; 0: no layer keeps a state."""
    state_chunk: int = 1
    """Tokens of which the kernels of these layers compute several together. The result depends on where a prompt is cut
    unless cuts lie at multiples of it, and unless at least two tokens remain at its end. 1: it never does."""
    media: MediaTraits | None = None
    """None: it reads text only."""
    fall_backs: list[tuple[str, str]] = []
    """What the worker's process does without: kinds and details, as in :mod:`tokenloom.process.fall_backs`."""
    draft_bytes_per_token: int = 0
    """What the layers of a draft model or head take of ``kv_bytes_per_token``. With groups every block has room for
    them, and those of full attention use it."""
    num_threads: int = 0
    """Threads with which each worker computes on a CPU; 0: it computes elsewhere. Without a batch-invariant order, sums
    in 16 bits may follow it."""
    argument_schemas: list[str] = []
    """The JSON schemas of what logits processors of plugins read of a request's ``extra_args``."""

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one block of the pool: of the layers of one group, or of all layers without groups."""
        if not self.kv_groups:
            return block_size * self.kv_bytes_per_token
        num_layers = sum(len(group.layers) for group in self.kv_groups)
        of_layer = (self.kv_bytes_per_token - self.draft_bytes_per_token) // num_layers
        return block_size * (of_layer * layers_per_group(self.kv_groups) + self.draft_bytes_per_token)

    def pool_bytes(self, block_size: int, num_blocks: int, num_state_slots: int) -> int:
        """Return the size of the memory in which a worker lays out its blocks and, behind them, its slots: those of
        requests, and one for dummy steps."""
        nbytes = num_blocks * self.block_bytes(block_size)
        return nbytes if not num_state_slots else slots_offset(nbytes) + (num_state_slots + 1) * self.state_bytes


def slots_offset(nbytes: int) -> int:
    """Return where the slots begin in the memory of a pool whose blocks take ``nbytes``: at a line of the cache."""
    return -(-nbytes // 64) * 64


class FreedMemory(msgspec.Struct, frozen=True):
    """Reports what falling asleep released, in bytes."""

    weights: int = 0
    kv_cache: int = 0
    kept_on_host: int = 0
    """The copy of the weights in the host's memory, from which a GPU's worker restores them; 0 on a CPU, which reads
    the checkpoint again."""

    def __add__(self, other: "FreedMemory") -> "FreedMemory":
        return FreedMemory(
            self.weights + other.weights, self.kv_cache + other.kv_cache, self.kept_on_host + other.kept_on_host
        )
