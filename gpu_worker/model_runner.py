"""One step of the model: differences in, tokens out."""

import numpy as np
import torch

from tokenloom.engine_core.pool_memory import PoolMemory
from tokenloom.engine_core.scheduler_output import ModelRunnerOutput, SchedulerOutput

from .attention.interface import AttentionBackend, IntArray, KVCache
from .input_batch import InputBatch, StepInputs
from .models.interface import Model
from .sampler import Sampler


class ModelRunner:
    """Turns scheduled work into arrays, runs the model over the paged KV cache and samples."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        batch: InputBatch,
        num_blocks: int,
        memory: PoolMemory | None = None,
    ) -> None:
        """``memory`` holds the KV caches; None: they are torch's own."""
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sampler = Sampler()
        self._kv_caches: list[KVCache] = backend.allocate(num_blocks, memory)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the scheduled tokens; a request draws a token once all that it has are computed.

        After an exception no request is known any more: the scheduler, if it goes on, begins them anew.
        """
        try:
            return self._execute(step)
        except BaseException:
            self._batch.clear()
            raise

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._batch.update(step)
        if not step.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = self._batch.prepare(step.num_scheduled_tokens)
        hidden = self._forward(inputs)
        return ModelRunnerOutput(req_ids=inputs.req_ids, sampled_token_ids=self._sample(inputs, hidden))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        plan = self._backend.plan(inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping)
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        return self._model.forward(token_ids, positions, self._kv_caches, plan)

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> list[list[int]]:
        """[R] the token of each request that draws one, nothing for one whose prompt goes on."""
        result: list[list[int]] = [[] for _ in inputs.req_ids]
        if not len(inputs.sampled):
            return result
        last_rows = torch.from_numpy(inputs.cu_query_lens[1:][inputs.sampled] - 1)
        logits = self._model.compute_logits(hidden[last_rows]).numpy()
        rows = inputs.rows[inputs.sampled]
        self._batch.logits_processors.apply(logits, rows)
        tokens = self._sampler.sample(logits, self._batch.sampling(inputs))
        self._batch.append(rows, np.array(tokens, dtype=np.int64))
        for index, token_id in zip(inputs.sampled.tolist(), tokens, strict=True):
            result[index] = [token_id]
        return result

    @torch.inference_mode()
    def dummy_run(self, query_lens: list[int], block_size: int) -> None:
        """Computes prompts of these lengths in blocks of their own from block 0 on, and logits of each one's end.

        For profiling and warming up: no request may hold a block.
        """
        lengths = np.array(query_lens, dtype=np.int64)
        num_blocks = -(-lengths // block_size)
        first_blocks = np.cumsum(num_blocks) - num_blocks
        positions = np.concatenate([np.arange(length) for length in query_lens])
        cu_query_lens = np.concatenate([[0], np.cumsum(lengths)])
        slots = positions + np.repeat(first_blocks * block_size, lengths)
        tables: IntArray = first_blocks[:, None] + np.arange(int(num_blocks.max()))
        plan = self._backend.plan(cu_query_lens, lengths, tables, slots)
        positions_tensor = torch.from_numpy(positions)
        hidden = self._model.forward(torch.zeros_like(positions_tensor), positions_tensor, self._kv_caches, plan)
        self._model.compute_logits(hidden[torch.from_numpy(cu_query_lens[1:] - 1)])
