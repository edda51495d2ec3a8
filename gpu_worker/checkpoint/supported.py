"""Names the architectures and methods that are built in, without importing torch: checks before the start read them."""

from typing import Literal

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt2",
    "opt",
    "transformers",
]
"""``transformers``: any class of that library; its modules hold what the switches of ``ModelConfig`` hold."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
}
"""Names every architecture that is built in and generates text."""

CLASS_HEAD = "ForSequenceClassification"
"""Ends the names of classes with a head for classes of prompts."""
CLASSIFIERS: dict[str, Family] = {
    name.replace("ForCausalLM", CLASS_HEAD): family
    for name, family in ARCHITECTURES.items()
    if family not in ("gpt2", "opt")
}
"""Names the decoders with a class head instead of an output layer."""

EncoderFamily = Literal["bert", "roberta", "modernbert"]
_ENCODER_NAMES: dict[str, EncoderFamily] = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
    "Camembert": "roberta",
    "ModernBert": "modernbert",
}
ENCODERS: dict[str, EncoderFamily] = {
    f"{name}{ending}": family
    for name, family in _ENCODER_NAMES.items()
    for ending in ("Model", "ForMaskedLM", CLASS_HEAD)
}
"""Names the encoders. Their heads for masked tokens are not used."""
BUILT_IN = frozenset((*ARCHITECTURES, *CLASSIFIERS, *ENCODERS))
"""Names all architectures that are built in."""


ACTIVATION_NAMES = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Names the activation functions, as checkpoints do; ``layers.activation.ACTIVATIONS`` computes them."""

QUANTIZATION_METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
"""The values of ``quant_method`` that are read."""
