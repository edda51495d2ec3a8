"""Drives a model runner as a scheduler does, with drafts or without."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tokenloom import demo_model
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts

DEMO_MODEL = Path(demo_model.__file__).parent
BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
BLOCKS_OF_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE
NUM_BLOCKS = 8 * BLOCKS_OF_REQUEST

Draft = Callable[[str, list[int]], list[int]]
"""Returns drafts for a request after an output."""


class NoProposals:
    """Fulfils the protocol of a proposer; the test makes the drafts."""

    def update(self, step):
        pass

    def propose(self, step, hidden, wanted):
        return {}

    def make_kv_caches(self):
        pass


class Driver:
    """Runs requests to their lengths: each has its own blocks, and its prompt is computed in one step."""

    def __init__(self, model, make_parts=None):
        """``make_parts`` returns for a batch what proposes, and how drafts are accepted if not by the rule."""
        backend = make_attention_backend("auto", model.config, BLOCK_SIZE, torch.device("cpu"))
        batch = InputBatch(8, MAX_MODEL_LEN, BLOCK_SIZE)
        self.proposer, rejection = make_parts(batch) if make_parts else (NoProposals(), None)
        self.runner = ModelRunner(
            model, backend, batch, NUM_BLOCKS, parts=RunnerParts(proposer=self.proposer, rejection=rejection)
        )
        self.steps = 0
        self.proposed = 0
        self.accepted = 0
        self.logprobs = {}

    def generate(self, requests, num_tokens, draft: Draft | None = None, wanted=0, grammar=None):
        """``requests``: (prompt, parameters) by name. Returns ``num_tokens`` tokens of each, and perhaps some more."""
        outputs = {name: [] for name in requests}
        drafts = {name: [] for name in requests}
        proposals = {}
        news = [
            NewRequestData(name, prompt, [], params, self._blocks(place), 0)
            for place, (name, (prompt, params)) in enumerate(requests.items())
        ]
        self.logprobs = {}
        cached, alive = CachedRequestData([], [], [], {}), list(requests)
        lengths = {name: len(prompt) for name, (prompt, _) in requests.items()}
        while alive:
            step = SchedulerOutput(
                news, cached, lengths, sum(lengths.values()), [], [],
                {name: drafts[name] for name in lengths if drafts[name]},
                dict.fromkeys(lengths, wanted),
            )  # fmt: skip
            self.runner.execute(step)
            output = self.runner.sample(self._masks(grammar, lengths, outputs, drafts) if grammar else None)
            self.steps += 1
            for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
                outputs[name] += tokens
                self.accepted += len(tokens) - 1
                if name in output.logprobs:
                    self.logprobs.setdefault(name, Logprobs([], [])).extend(output.logprobs[name])
            proposals = output.draft_token_ids
            self.proposed += sum(map(len, proposals.values()))
            alive = [name for name in requests if len(outputs[name]) < num_tokens]
            for name in alive:
                drafts[name] = draft(name, outputs[name]) if draft else proposals.get(name, [])
            news, lengths = [], {name: 1 + len(drafts[name]) for name in alive}
            computed = [len(requests[name][0]) + len(outputs[name]) - 1 for name in alive]
            cached = CachedRequestData(alive, [[] for _ in alive], computed, {})
        self.runner.execute(SchedulerOutput([], CachedRequestData([], [], [], {}), {}, 0, list(requests), []))
        return outputs

    def _blocks(self, place):
        return list(range(place * BLOCKS_OF_REQUEST, (place + 1) * BLOCKS_OF_REQUEST))

    def _masks(self, grammar, lengths, outputs, drafts):
        """``grammar(name, output)`` returns the tokens that may follow an output, [vocab] bool, or None."""
        req_ids, rows = [], []
        for name in lengths:
            for number in range(len(drafts[name]) + 1):
                allowed = grammar(name, outputs[name] + drafts[name][:number])
                if allowed is not None:
                    req_ids.append(name)
                    rows.append(np.packbits(allowed, bitorder="little").view(np.int32))
        return GrammarOutput(req_ids, np.array(rows)) if req_ids else None
