"""Large-language-model serving as a mesh of small gRPC services.

``from tokenloom import LLM, SamplingParams`` runs a model in this process; ``tokenloom serve`` runs the mesh;
``tokenloom.v1`` holds the client stubs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine_core.data.errors import EngineDeadError as EngineDeadError
    from .engine_core.data.errors import EnginePausedError as EnginePausedError
    from .offline.async_llm import AsyncLLM as AsyncLLM
    from .offline.beam_search import BeamSearchOutput as BeamSearchOutput
    from .offline.beam_search import BeamSearchParams as BeamSearchParams
    from .offline.beam_search import BeamSearchSequence as BeamSearchSequence
    from .offline.engine_args import EngineArgs as EngineArgs
    from .offline.llm import LLM as LLM
    from .offline.llm_engine import LLMEngine as LLMEngine
    from .offline.lora_request import LoRARequest as LoRARequest
    from .offline.outputs import ClassificationOutput as ClassificationOutput
    from .offline.outputs import CompletionOutput as CompletionOutput
    from .offline.outputs import EmbeddingOutput as EmbeddingOutput
    from .offline.outputs import Logprob as Logprob
    from .offline.outputs import PoolingOutput as PoolingOutput
    from .offline.outputs import PoolingParams as PoolingParams
    from .offline.outputs import PoolingRequestOutput as PoolingRequestOutput
    from .offline.outputs import RequestOutput as RequestOutput
    from .offline.outputs import RequestOutputKind as RequestOutputKind
    from .offline.outputs import ScoringOutput as ScoringOutput
    from .offline.sampling_params import SamplingParams as SamplingParams
    from .offline.tensor_file import send_weights as send_weights
    from .request.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from .request.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from .services.engine.records.stat_log import EngineStats as EngineStats
    from .services.engine.records.stat_log import StatLogger as StatLogger

__version__ = "0.1.0"
_HOMES = {
    "AsyncLLM": ".offline.async_llm",
    "BeamSearchOutput": ".offline.beam_search",
    "BeamSearchParams": ".offline.beam_search",
    "BeamSearchSequence": ".offline.beam_search",
    "ClassificationOutput": ".offline.outputs",
    "CompletionOutput": ".offline.outputs",
    "LoRARequest": ".offline.lora_request",
    "EmbeddingOutput": ".offline.outputs",
    "EngineArgs": ".offline.engine_args",
    "EngineDeadError": ".engine_core.data.errors",
    "EnginePausedError": ".engine_core.data.errors",
    "EngineStats": ".services.engine.records.stat_log",
    "LLM": ".offline.llm",
    "LLMEngine": ".offline.llm_engine",
    "Logprob": ".offline.outputs",
    "PoolingOutput": ".offline.outputs",
    "PoolingParams": ".offline.outputs",
    "PoolingRequestOutput": ".offline.outputs",
    "RepetitionDetectionParams": ".request.sampling_params",
    "RequestOutput": ".offline.outputs",
    "RequestOutputKind": ".offline.outputs",
    "SamplingParams": ".offline.sampling_params",
    "ScoringOutput": ".offline.outputs",
    "StatLogger": ".services.engine.records.stat_log",
    "StructuredOutputsParams": ".request.sampling_params",
    "send_weights": ".offline.tensor_file",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineArgs",
    "EngineDeadError",
    "EnginePausedError",
    "EngineStats",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "StatLogger",
    "StructuredOutputsParams",
    "__version__",
    "send_weights",
]


def __getattr__(name: str) -> Any:
    """Imports the offline API on first use: services import this package too, and must stay without torch."""
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name], __name__), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(__name__):
                raise
            # Named, because the client's distribution has this module too, and a missing module of ours says little.
            raise ImportError(f"{name} is part of the package tokenloom; only tokenloom-client is installed") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
