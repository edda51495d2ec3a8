"""Defines the results of the offline API and what keeps them until they are read, and the parameters of pooling, with
vLLM's names."""

import asyncio
import enum
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:  # clients import this module, and are installed without numpy
    import numpy as np
    import numpy.typing as npt
    import torch


class RequestOutputKind(enum.Enum):
    """Selects what each output of :meth:`tokenloom.LLM.stream` holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """Everything, in a single output at the end."""


@dataclass
class Logprob:
    """The log probability of a token at one position, in the model's own distribution."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 is the best; None for tokens that the request names and that are not among the best."""
    decoded_token: str | None = None
    """The token's text; None without ``detokenize``."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Position among the outputs of the request."""
    text: str
    token_ids: list[int]
    """Includes the token that ended the output."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; None unless ``logprobs`` was set, like the next field."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token a dict by token id: first the token itself, then the others."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``repetition``, ``abort``, or ``error`` with ``RequestOutput.error``."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``; None for the model's own end-of-sequence tokens."""
    routed_experts: "npt.NDArray[np.unsignedinteger] | None" = None
    """[tokens, layers with experts, experts of a token]: which experts computed each token, once the output has ended;
    None unless ``return_routed_experts`` was set. The rows end before the last output token, which was not computed.
    They begin at ``routed_experts_prompt_start``, or after the prompt for outputs after the first."""
    num_reasoning_tokens: int | None = None
    """Tokens of the reasoning before the answer, without the marks around it; None if these are not known."""

    def finished(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, news: "CompletionOutput") -> "CompletionOutput":
        """Return what this piece and the one after it hold together. Neither is changed."""
        logprobs = news.logprobs if self.logprobs is None else [*self.logprobs, *(news.logprobs or ())]
        return replace(news, text=self.text + news.text, token_ids=self.token_ids + news.token_ids, logprobs=logprobs)


@dataclass
class RequestOutput:
    """One prompt and its outputs."""

    request_id: str
    prompt: str | None
    """None for a prompt given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, as in ``logprobs``, but None for the first. None unless ``prompt_logprobs`` was set."""
    error: str | None = None
    """Why the request, one of several or enqueued, was refused or failed; its outputs hold what came before."""
    weights_versions: tuple[int, ...] = (0,)
    """Which weights computed the outputs: how often others had been loaded before. Several, in order, if a pause in the
    mode ``keep`` let the request go on over a change, or ``wait`` let some of its samples end and others not begin."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The reasoning tokens of all outputs; None if the marks around the model's reasoning are not known."""
        counts = [output.num_reasoning_tokens for output in self.outputs]
        return sum(count for count in counts if count is not None) if None not in counts else None

    def merged(self, news: "RequestOutput", *, are_pieces: bool) -> "RequestOutput":
        """Return one output in place of this one and a newer one of the same request. Neither is changed.

        ``are_pieces``: whether each holds only what is new (``DELTA``); otherwise the newer one of each sample stays.
        """
        outputs = {output.index: output for output in self.outputs}
        for output in news.outputs:
            before = outputs.get(output.index) if are_pieces else None
            outputs[output.index] = output if before is None else before.followed_by(output)
        return replace(news, outputs=[outputs[index] for index in sorted(outputs)])


PoolingTaskName = Literal["embed", "classify", "score", "token_embed", "token_classify"]


@dataclass(frozen=True)
class PoolingParams:
    """Controls what is pooled from a prompt."""

    dimensions: int | None = None
    """How many numbers of each vector to keep (Matryoshka); None: all."""
    use_activation: bool | None = None
    """Whether vectors are normalized, and logits become probabilities; None: as the model says."""
    task: PoolingTaskName | None = None
    """What to return; only for :meth:`tokenloom.LLM.encode`."""


@dataclass(frozen=True)
class PoolingOutput:
    """What was pooled from a prompt."""

    data: "torch.Tensor"
    """float32 [], [n] or [tokens, n]"""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """The probabilities of a prompt's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """The relevance of one text to another."""

    score: float


Output = TypeVar("Output", covariant=True)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """One prompt and its result."""

    request_id: str
    outputs: Output
    """None with ``error``."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: bool = True
    error: str | None = None
    """Why the request, one of several, was refused or failed."""


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


EngineOutput: TypeAlias = RequestOutput | PoolingRequestOutput[PoolingOutput]


class OutputCollector:
    """Keeps the outputs of one request until they are read: a slow reader gets what has come meanwhile as one output,
    so neither the engine nor other readers wait for it.

    The engine's thread puts, and one task of the event loop that made the collector gets.
    """

    def __init__(self, *, are_pieces: bool) -> None:
        """``are_pieces``: whether each output holds only what is new."""
        self.loop = asyncio.get_running_loop()
        self._are_pieces = are_pieces
        self._lock = threading.Lock()
        self._has_news = asyncio.Event()
        self._output: EngineOutput | None = None
        self._error: Exception | None = None

    def put(self, output: EngineOutput | None, error: Exception | None = None) -> bool:
        """Add an output, or the error that ends them. Returns whether the reader must be told by :meth:`wake`."""
        with self._lock:
            was_empty = self._output is None and self._error is None
            before = self._output
            if isinstance(before, RequestOutput) and isinstance(output, RequestOutput):
                self._output = before.merged(output, are_pieces=self._are_pieces)
            elif output is not None:
                self._output = output
            self._error = self._error or error
        return was_empty

    def wake(self) -> None:
        """Let the reader go on. To be called in its event loop."""
        self._has_news.set()

    async def get(self) -> EngineOutput:
        """Wait for an output. Raises the error that ends them, after the last one."""
        while True:
            with self._lock:
                output, self._output = self._output, None
                error = self._error
            if output is not None:
                return output
            if error is not None:
                raise error
            self._has_news.clear()
            await self._has_news.wait()
