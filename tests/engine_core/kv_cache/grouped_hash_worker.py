"""A hash worker with groups of layers: every token that a group's window shows must lie where its table says."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tests.engine_core.helpers import VOCAB_SIZE
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.kv_groups import KVGroup
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

WINDOWS = (None, 9, 9, 20)
"""Two windows, one of them in two groups."""

_MARK = 1 << 20
"""What is added to a position for each group before it, so that no group reads another one's blocks."""


def groups_of(windows: Sequence[int | None]) -> list[KVGroup]:
    """Return a group of one layer for each window."""
    return [KVGroup(window, [layer]) for layer, window in enumerate(windows)]


class GroupedHashWorker(HashWorker):
    """Draws the tokens of :class:`HashWorker` from the first group, which must see all; checks the others' blocks."""

    def __init__(self, config: EngineConfig, windows: Sequence[int | None], max_model_len: int = 256) -> None:
        super().__init__(config, vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
        assert windows[0] is None
        self._groups = groups_of(windows)
        self._tables: dict[str, list[int]] = {}

    def load_model(self) -> ModelInfo:
        info = super().load_model()
        # The bytes are those of one group's tokens: all blocks have the same size.
        num_groups = len(self._groups)
        return msgspec.structs.replace(
            info, kv_groups=self._groups, kv_bytes_per_token=info.kv_bytes_per_token * num_groups
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        scheduler_output = self._with_drafts(scheduler_output)
        self._take_tables(scheduler_output)
        starts = scheduler_output.num_computed_tokens()
        super().execute_model(_of_first_group(scheduler_output, len(self._groups)))
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            for group in range(1, len(self._groups)):
                positions = np.arange(starts[req_id], starts[req_id] + num_tokens)
                self._cache[self._slots(req_id, group, positions)] = self._content(req_id, group, positions)
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            for group in range(len(self._groups)):
                self._check(req_id, group, starts[req_id], starts[req_id] + num_tokens)

    def _check(self, req_id: str, group: int, start: int, end: int) -> None:
        """Check what the queries at positions [start, end) see."""
        window = self._groups[group].window
        positions = np.arange(0 if window is None else max(0, start - window + 1), end)
        found = self._cache[self._slots(req_id, group, positions)]
        assert np.array_equal(found, self._content(req_id, group, positions)), f"{req_id}: wrong KV in group {group}"

    def _content(self, req_id: str, group: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        token_ids = np.array(self._rows[req_id].token_ids + self._drafts.get(req_id, []))[positions]
        return np.column_stack((token_ids, positions + group * _MARK))

    def _slots(self, req_id: str, group: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        table = np.array(self._tables[req_id][group :: len(self._groups)])
        return table[positions // self._block_size] * self._block_size + positions % self._block_size

    def _take_tables(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_token_ids:
                self._tables[req_id] = []
            self._tables[req_id] += block_ids


def _of_first_group(step: SchedulerOutput, num_groups: int) -> SchedulerOutput:
    replace = msgspec.structs.replace
    cached = step.scheduled_cached_reqs
    return replace(
        step,
        scheduled_new_reqs=[replace(new, block_ids=new.block_ids[::num_groups]) for new in step.scheduled_new_reqs],
        scheduled_cached_reqs=replace(cached, new_block_ids=[ids[::num_groups] for ids in cached.new_block_ids]),
    )
