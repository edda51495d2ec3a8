"""Joins verifying and proposing for the model runner."""

from collections.abc import Mapping

from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput

from ..batch.input_batch import StepInputs
from ..sampler.step_sampler import StepSampler
from .interface import Proposer
from .rejection import RejectionSampler
from .verify import Verifier


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
