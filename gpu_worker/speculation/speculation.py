"""Defines what proposes tokens, and joins verifying and proposing for the model runner."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput

from ..attention.attention_backend import IntArray
from ..batch.input_batch import Ints, StepInputs
from ..sampler.step_sampler import StepSampler
from .rejection import RejectionSampler
from .verify import Verifier

StepArrays = tuple[IntArray, IntArray, IntArray, IntArray]
"""The arguments of :meth:`AttentionBackend.plan`."""


class Proposer(Protocol):
    """Proposes the tokens that may follow the last one of a request."""

    def update(self, step: SchedulerOutput) -> None:
        """Forget requests that ended or were preempted, and those that begin or resume."""

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Return drafts of requests of ``step``: at most ``wanted[request]`` of each, none of one that is not named.

        The step's tokens are drawn and appended to the batch. ``hidden`` [T, hidden_size] holds the model's last hidden
        states of the step's tokens. Called after every step, with requests that want drafts or without.
        """

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content; no step may run before :meth:`make_kv_caches`."""

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Compute what follows a step of the model, for a profile.

        ``positions`` [T] are the tokens', ``hidden`` [T, hidden_size] the model's last hidden states.
        """


class Speculation:
    """Follows the steps of one model runner."""

    def __init__(self, sampler: StepSampler, proposer: Proposer, rejection: RejectionSampler | None) -> None:
        """``rejection``: how drafts are accepted; None: if they equal the tokens that are drawn."""
        self._verifier = Verifier(sampler, rejection)
        self.proposer = proposer
        self._rejection = rejection
        self._wanted: Mapping[str, int] = {}
        self._is_paused = False

    def update(self, step: SchedulerOutput) -> None:
        """Take what changed with a step, before it is computed."""
        self.proposer.update(step)
        if self._rejection is not None:
            self._rejection.forget(step.finished_req_ids + step.preempted_req_ids)
        self._wanted, self._is_paused = step.num_drafts_wanted, step.drafts_paused

    def verify(
        self, inputs: StepInputs, logits: Tensor, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> None:
        """Draw the tokens of a step with drafts; see :meth:`Verifier.verify`."""
        self._verifier.verify(inputs, logits, grammar, output)

    def propose(self, inputs: StepInputs, hidden: Tensor, output: ModelRunnerOutput) -> None:
        """Add drafts of the next tokens to ``output``. ``hidden`` [T, hidden_size]: the step's last hidden states."""
        if self._is_paused and len(inputs.token_ids) == len(inputs.req_ids):
            return  # every request decodes
        wanted = {}
        if self._wanted:
            for req_id, tokens in zip(inputs.req_ids, output.sampled_token_ids, strict=True):
                if tokens and (count := self._wanted.get(req_id, 0)) > 0:
                    wanted[req_id] = count
        output.draft_token_ids = self.proposer.propose(inputs, hidden, wanted)
