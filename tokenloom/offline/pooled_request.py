"""Follows one prompt of the offline API that is pooled."""

from collections.abc import Sequence

import torch

from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest

from . import core_refusal
from .pooling_outputs import PoolingOutput, PoolingRequestOutput


class PooledSample:
    """Holds the only sample of a request; it is also its own completion."""

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self.core_request = core_request
        self.completion = self
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished


class OfflinePooledRequest:
    """Fulfils :class:`.offline_loop.InFlight`."""

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self._sample = PooledSample(core_request)
        self.samples: Sequence[PooledSample] = [self._sample]
        self._result: EngineCoreOutput | None = None
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self._sample.is_finished

    @property
    def num_tokens(self) -> int:
        """Return 0: pooling draws no tokens."""
        return 0

    def accept(self, sample: PooledSample, step: EngineCoreOutput) -> bool:
        """Take the result. Returns False: the core has ended the request. Raises `CoreRefusal`."""
        sample.is_finished = True
        core_refusal.check(step)
        self._result = step
        return False

    def abort(self, error: Exception | None = None) -> None:
        """End the request without a result, because of an error if there is one."""
        self._sample.is_finished = True
        self.error = self.error or error

    def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a request that has ended."""
        step, request = self._result, self._sample.core_request
        if step is None or step.pooled is None:
            raise RuntimeError("the request was aborted")
        num_cached = step.prefill_stats.num_cached_tokens if step.prefill_stats is not None else 0
        data = torch.from_numpy(step.pooled.copy())
        return PoolingRequestOutput(request.request_id, PoolingOutput(data), request.prompt_token_ids, num_cached)
