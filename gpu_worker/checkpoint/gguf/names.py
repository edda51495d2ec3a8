"""Maps the names of GGUF's tensors to those of Hugging Face's classes, and says which rows were reordered."""

from dataclasses import dataclass

from tokenloom.gguf.gguf_file import GgufFile

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""By ``general.architecture``. Files of Mistral and of Mixtral say llama."""

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors [experts, out, in] that hold a matrix of every expert of a layer."""
_IN_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ROPE_FACTORS = "rope_freqs.weight"
"""By how much each frequency of a Llama 3.1 is divided; read with the configuration."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Says where a tensor is found."""

    stored: str
    """The tensor's name in the file."""
    heads: int | None
    """Not None: the rows of each of so many heads are stored in pairs, as llama.cpp rotates Llama's."""
    expert: int | None = None
    """Not None: the tensor holds the matrices of all experts, and this one is meant."""


def places(file: GgufFile) -> dict[str, TensorPlace]:
    """Return the file's tensors by the names that models ask for. A tensor that has none keeps its own name."""
    architecture = file.metadata["general.architecture"]
    heads = dict.fromkeys(("attn_q", "attn_k"))
    if architecture == "llama":
        queries = file.metadata.get("llama.attention.head_count")
        heads = {"attn_q": queries, "attn_k": file.metadata.get("llama.attention.head_count_kv", queries)}
    found = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        found[_WHOLE_MODEL.get(name, name)] = TensorPlace(name, None)
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        if name.startswith("blk.") and part in _OF_A_LAYER:
            del found[name]
            found[f"model.layers.{block}.{_OF_A_LAYER[part]}.{kind}"] = TensorPlace(name, heads.get(part))
        elif name.startswith("blk.") and part in _OF_EXPERTS and len(shape := file.tensors[name].shape) == 3:
            del found[name]
            for expert in range(shape[0]):
                own = f"model.layers.{block}.mlp.experts.{expert}.{_OF_EXPERTS[part]}.{kind}"
                found[own] = TensorPlace(name, None, expert)
    is_mixtral = architecture == "llama" and has_experts(file)
    return {_mixtral_name(name): place for name, place in found.items()} if is_mixtral else found


def has_experts(file: GgufFile) -> bool:
    """Return whether the model's layers choose some of many MLPs for each token."""
    return bool(file.metadata.get(f"{file.metadata['general.architecture']}.expert_count"))


def _mixtral_name(name: str) -> str:
    """Return the name that Mixtral's class has for what Qwen's classes call ``name``."""
    before, between, after = name.partition(".mlp.")
    for own, mixtral in _IN_MIXTRAL.items():
        after = after.replace(own, mixtral)
    return f"{before}.block_sparse_moe.{after}" if between else name
