"""Tokens on their way to the host."""

import torch

from tests.gpu_worker.cuda.late_link import LateLink
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput
from tokenloom.gpu_worker.device.device_link import HostLink
from tokenloom.gpu_worker.sampler.device.device_sampler import NO_CHOICE
from tokenloom.gpu_worker.sampler.device.sampling_arrays import PendingTokens, SampledRows
from tokenloom.gpu_worker.sampler.host.sampler import NO_TOKEN
from tokenloom.gpu_worker.sampler.step_sampler import PendingStep


def test_tokens_are_there_after_their_event_and_not_before():
    link = LateLink()
    first, second = (PendingTokens.fetch(torch.tensor(ids), link) for ids in ([5, 6], [7]))
    assert not first.has_arrived()
    assert first.wait() == [5, 6]
    assert first.has_arrived()
    assert not second.has_arrived()
    assert second.wait() == [7]
    assert first.wait() == [5, 6]
    assert link.num_waits == 2, "what is there is not waited for"


def test_where_the_device_is_the_host_tokens_are_there_at_once():
    tokens = PendingTokens.fetch(torch.tensor([3]), HostLink())
    assert tokens.has_arrived()
    assert tokens.wait() == [3]


def test_the_output_of_a_step_gets_its_tokens_once():
    link = LateLink()
    output = ModelRunnerOutput(["a", "b", "c", "d"], [])
    ids = torch.tensor([4, NO_TOKEN, NO_CHOICE])
    pending = PendingStep(output, SampledRows(ids, PendingTokens.fetch(ids, link), None, ()), [0, 2, 3], has_masks=True)
    assert output.sampled_token_ids == []
    assert pending.result() is output
    assert pending.result() is output
    assert output.sampled_token_ids == [[4], [], [], []]
    assert output.without_finite_logit == ["c"]
    assert output.without_choice == ["d"]
    assert link.num_waits == 1
