"""Maps the names of GGUF's tensors to those of Hugging Face's classes, and says which rows were reordered."""

from dataclasses import dataclass

from tokenloom.gguf.gguf_file import GgufFile

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""By how much each frequency of a Llama 3.1 is divided; read with the configuration."""


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a tensor is found."""

    stored: str
    """The tensor's name in the file."""
    heads: int | None
    """Not None: the rows of each of so many heads are stored in pairs, as llama.cpp rotates Llama's."""


def places(file: GgufFile) -> dict[str, Place]:
    """Return the file's tensors by the names that models ask for. A tensor that has none keeps its own name."""
    architecture = file.metadata["general.architecture"]
    heads = dict.fromkeys(("attn_q", "attn_k"))
    if architecture == "llama":
        queries = file.metadata.get("llama.attention.head_count")
        heads = {"attn_q": queries, "attn_k": file.metadata.get("llama.attention.head_count_kv", queries)}
    found = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        found[_WHOLE_MODEL.get(name, name)] = Place(name, None)
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        if name.startswith("blk.") and part in _OF_A_LAYER:
            del found[name]
            found[f"model.layers.{block}.{_OF_A_LAYER[part]}.{kind}"] = Place(name, heads.get(part))
    return found
