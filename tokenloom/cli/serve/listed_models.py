"""The short list of models that ``tokenloom run`` knows by name."""

from dataclasses import dataclass

from tokenloom.model_files.model_path import DEMO_MODEL_NAME


@dataclass(frozen=True)
class ListedModel:
    """A model that a newcomer may begin with."""

    model: str
    """Its hub id, or the name of one that comes with the package."""
    gigabytes: float
    """Size of its download, about."""
    licence: str
    about: str
    flags: tuple[str, ...] = ()
    """Recommended flags of ``tokenloom serve``."""


_SHORTER = ("--max-model-len", "8192")
"""Less than what the model could read: one request of full length has to fit the KV cache of a small machine."""
MODELS = {
    "demo": ListedModel(DEMO_MODEL_NAME, 0.0, "Apache-2.0", "comes with the package, to try the mesh"),
    "qwen3-0.6b": ListedModel("Qwen/Qwen3-0.6B", 1.5, "Apache-2.0", "small, thinks before it answers", _SHORTER),
    "qwen3-1.7b": ListedModel("Qwen/Qwen3-1.7B", 4.1, "Apache-2.0", "thinks before it answers", _SHORTER),
    "qwen3-4b": ListedModel("Qwen/Qwen3-4B", 8.0, "Apache-2.0", "thinks before it answers", _SHORTER),
    "gemma3-1b": ListedModel("google/gemma-3-1b-it", 2.0, "Gemma terms, to accept", "many languages", _SHORTER),
    "llama3.2-1b": ListedModel(
        "meta-llama/Llama-3.2-1B-Instruct", 2.5, "Llama 3.2, to accept", "quick answers", _SHORTER
    ),
    "phi3-mini": ListedModel("microsoft/Phi-3-mini-4k-instruct", 7.6, "MIT", "reasons well for its size"),
    "smollm3-3b": ListedModel("HuggingFaceTB/SmolLM3-3B", 6.2, "Apache-2.0", "six languages", _SHORTER),
}
"""By short name. The hub gives those ``to accept`` to accounts that have accepted their terms, with HF_TOKEN."""
