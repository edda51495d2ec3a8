"""Computes steps of the sizes that will run, so that kernels, layouts and buffers exist before the first request."""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig, SchedulerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.model_info import MediaTraits

from .attention.grouped_backend import PoolLayers
from .checkpoint.model_config import ModelConfig
from .kernels.levels import processor_features
from .lora.slots import LoraSlots
from .model_runner import ModelRunner
from .platform.platform import Platform

log = logging.getLogger(__name__)

_GREEDY = CoreSamplingParams(max_tokens=1, seed=0, temperature=0.0)
_DRAWN = CoreSamplingParams(max_tokens=1, seed=0, temperature=1.0, top_k=50, top_p=0.9)

_NEARLY_FREE = 1.5
"""How many times as long as a step of one row a step may take for its rows to be nearly free."""
# With recorded steps, which take a third of the time of operations called one by one: the time around them is smaller
# too, and fewer rows count as free.
_AROUND_SECONDS = 0.0003
"""What a step takes in addition to the model, for scheduling, sampling and messages."""
_MATRICES_PER_LAYER = 12
"""How many matrices of hidden_size x hidden_size a usual layer of a transformer is as large as."""
# At load 4 to 6 on two cores, two threads took 0.5 to 4.6 s of CPU for the demo model's step of 2,048 tokens, one
# thread 0.3 s. A smaller step would not show the memory that is needed.
_SMALL_STEP = 1 << 33
"""Multiplications that one core does in about half a second."""
_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_REPEATS = 3


class LargestStep(NamedTuple):
    """Describes the largest step after it was computed."""

    num_tokens: int
    activation_bytes: int
    """Memory that it needed in addition to weights and KV blocks."""
    seconds: float


_Count = Annotated[int, Meta(ge=0)]


class WarmUpFindings(msgspec.Struct, frozen=True):
    """What a whole warm-up has measured."""

    num_tokens: _Count
    activation_bytes: _Count
    step_seconds: Annotated[float, Meta(ge=0)]
    free_rows: _Count
    """As in ``WarmUp``."""

    @property
    def largest(self) -> LargestStep:
        return LargestStep(self.num_tokens, self.activation_bytes, self.step_seconds)


class WarmUpNotes:
    """Keeps in a folder what a warm-up has measured, so that the next engine of the same kind need not measure it.

    A file that cannot be read or written is like none: then everything is measured.

    Attributes:
        found: What such an engine has measured before; None: nothing, or :meth:`largest_step` was not called yet.
    """

    def __init__(self, folder: Path | None, config: EngineConfig, model: ModelConfig) -> None:
        """``folder``: None: nothing is kept."""
        self._folder = folder
        versions = (torch.__version__, sorted(processor_features()))
        self._kind = (versions, torch.get_num_threads(), model, *_deciding(config))
        self._file = folder
        self._largest: LargestStep | None = None
        self.found: WarmUpFindings | None = None

    def largest_step(self, lengths: list[int], measure: Callable[[list[int]], LargestStep]) -> LargestStep:
        """Return what is known of the largest step, of prompts of these lengths, or what ``measure`` returns."""
        if self._folder is not None:
            digest = hashlib.sha256(repr((self._kind, lengths)).encode()).hexdigest()
            self._file = self._folder / f"{digest[:32]}.json"
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self.found = msgspec.json.decode(self._file.read_bytes(), type=WarmUpFindings)
        self._largest = measure(lengths) if self.found is None else self.found.largest
        return self._largest

    def keep(self, free_rows: int) -> None:
        """Keep what was measured, with the result of :func:`free_rows`."""
        if self._folder is None or self._file is None or self._largest is None or self.found is not None:
            return
        temporary = self._file.with_suffix(f".{os.getpid()}")  # engines that start together may write the same
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(WarmUpFindings(*self._largest, free_rows)))
            temporary.replace(self._file)


def _deciding(config: EngineConfig) -> tuple[object, ...]:
    """Return the options on which the memory and the time of a step depend."""
    # Not the place of the model's files: its configuration and these options decide the shapes.
    worker = replace(config.worker, model="", cpus=(), place_on_host=0, profiler_dir="", warm_up_dir="")
    cache = (config.cache.block_size, config.cache.dtype, config.cache.num_blocks)
    return (config.scheduler, worker, cache, config.lora, config.speculative, config.max_model_len, config.plugins)


FEW_ROWS = 4
"""The largest decode step of a warm-up that need not measure anything."""


def largest_step(scheduler: SchedulerConfig, max_model_len: int, *, in_chunks: bool = False) -> list[int]:
    """Return the query lengths of the largest step: the longest prompts that leave one token to each other request, so
    that the token budget is full and as many requests as possible draw a token. ``in_chunks``: whether layers compute
    prompts in chunks: two tokens, since a prompt of two takes the memory of a whole chunk."""
    tokens, least = scheduler.max_num_batched_tokens, 2 if in_chunks else 1
    lengths = []
    for others in range(min(scheduler.max_num_seqs, tokens // least) - 1, -1, -1):
        lengths.append(min(max_model_len, tokens - least * others))
        tokens -= lengths[-1]
    return lengths


# The first requests paid for kernels, layouts and buffers when only one token was warmed up.
def decode_batches(scheduler: SchedulerConfig, num_blocks: int) -> list[int]:
    """Return numbers of requests: the powers of two up to the most that may decode at once, and that number."""
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, num_blocks)
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def within(num_blocks: int, block_size: int, lengths: list[int]) -> list[int]:
    """Return as many of these prompts, the last perhaps shortened, as fit into the blocks."""
    fitting = []
    for length in lengths:
        if num_blocks <= 0:
            break
        fitting.append(min(length, num_blocks * block_size))
        num_blocks -= -(-length // block_size)
    return fitting


def num_differing_layers(config: ModelConfig) -> int:
    """Return how many layers from the first one on include every window, with experts and without, and one that begins
    as all later ones do: with the memory that a whole layer has freed."""
    if config.mixer is not None:
        return config.num_layers
    windows = config.sliding_windows
    # Experts may begin late (DeepSeek-V3: with layer 3) and take several times the memory of an MLP.
    kinds = list(zip(windows, config.experts.layers if config.experts else windows, strict=True))
    return max(3, *(kinds.index(kind) + 1 for kind in set(kinds)))


def is_small_step(num_tokens: int, num_layers: int, hidden_size: int) -> bool:
    """Return whether one thread computes a step of so many tokens and layers in about half a second."""
    return num_tokens * num_layers * _MATRICES_PER_LAYER * hidden_size**2 <= _SMALL_STEP


@contextlib.contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute on the host with one thread, if ``wanted``, and then with as many as before.

    Threads that share a step spin until the last one is done. While other programs use the cores, as at the start of a
    mesh, a small step takes them several times as much CPU and time as one thread.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)


def run_decode_steps(runner: ModelRunner, batches: list[int], block_size: int) -> None:
    """Compute decode steps of so many requests, and draw tokens in each way. This writes to the KV pool."""
    for batch in batches:
        logits = runner.dummy_run([1] * batch, block_size)
        runner.dummy_sample(logits, _GREEDY)
    runner.dummy_sample(logits[:1], _DRAWN)


def free_rows(run: Callable[[int], object], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the most rows, up to ``most``, of a decode step that takes hardly longer than one of one row: so many
    drafts are verified at little cost.

    Args:
        run: Computes a step of so many rows and waits for the device.
        clock: Returns seconds.
    """

    def least_seconds(num_rows: int) -> float:
        run(num_rows)  # is recorded, which takes longer
        times = []
        for _ in range(_REPEATS):
            started = clock()
            run(num_rows)
            times.append(clock() - started)
        return min(times)

    limit = _NEARLY_FREE * least_seconds(1) + (_NEARLY_FREE - 1) * _AROUND_SECONDS
    found = 1
    for num_rows in _ROWS:
        # Measured twice before the search ends: another process may have delayed all steps of the first measurement.
        if num_rows > most or (least_seconds(num_rows) > limit and least_seconds(num_rows) > limit):
            break
        found = num_rows
    return found


@dataclass(frozen=True)
class WarmedModel:
    """What the steps of a worker's start are computed with."""

    model: ModelConfig
    """With the dtype of the KV cache."""
    layers: PoolLayers
    make_runner: Callable[[int], ModelRunner]
    """Returns a runner over a pool of its own, of so many blocks."""
    loras: LoraSlots | None
    media: MediaTraits | None
    draft_bytes_per_token: int
    """Of the KV of what drafts."""
    is_alone: bool
    """Whether no other rank computes a part of each step."""


class StartSteps:
    """Computes the steps of a worker's start, and measures what the largest one takes.

    Attributes:
        largest: The largest step; None: it was not computed yet.
    """

    def __init__(self, config: EngineConfig, platform: Platform, warmed: WarmedModel) -> None:
        self._config = config
        self._platform = platform
        self._warmed = warmed
        # Steps of several ranks are computed by all of them or by none, and those of a device make what requests need.
        keeps = config.worker.warm_up_dir and platform.pool_is_on_host and warmed.is_alone
        self._notes = WarmUpNotes(Path(config.worker.warm_up_dir) if keeps else None, config, warmed.model)
        self.largest: LargestStep | None = None

    def compute_largest(self, lengths: list[int]) -> LargestStep:
        """Compute the largest step, of prompts of these lengths, unless what it takes is known. Raises ``ValueError``
        if the memory of the device has no room for it."""
        # The step in all layers was most of a start: 1.5 s of CPU for the demo model instead of 0.9, minutes for
        # billions of weights. Each layer frees its activations before the next, so a few show the same peak.
        try:
            self.largest = self._notes.largest_step(lengths, self._measure)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"beside the weights there is no memory for a step of {sum(lengths)} tokens: lower "
                f"max_num_batched_tokens ({error})"
            ) from error
        return self.largest

    def graph_bytes(self) -> int:
        """Return how much memory of a device the graphs of steps keep: capture them over a pool of one block, because
        where the KV lies does not change that, and drop them."""
        platform = self._platform
        if self._config.worker.enforce_eager or platform.make_capture() is None:
            return 0
        runner = self._warmed.make_runner(1)
        kept = platform.kept_by(runner.record_ahead)
        del runner
        platform.return_freed()
        log.info("graphs of steps keep %.2f GiB beside the KV pool", kept / (1 << 30))
        return kept

    def compute(self, runner: ModelRunner, kv_cache: KVCacheConfig) -> WarmUp:
        """Compute steps of the sizes to come over the pool of ``runner``, after :meth:`compute_largest`. The seconds of
        the result are those of the largest step."""
        config, block_size, num_blocks = self._config, self._config.cache.block_size, kv_cache.num_blocks
        assert self.largest is not None, "compute_largest comes first"
        batches = decode_batches(config.scheduler, num_blocks)
        if (found := self._notes.found) is not None:
            # First steps of further sizes take hardly longer than later ones.
            batches = [batch for batch in batches if batch <= FEW_ROWS]
        with one_thread(self._is_small(sum(batches), self._warmed.model.num_layers)):
            run_decode_steps(runner, batches, block_size)
            if not self._platform.pool_is_on_host:
                self._run_prompts(runner, kv_cache)
        # How many steps it measures depends on their times, and all ranks must compute the same.
        num_free = 0 if found is None else found.free_rows
        if found is None and config.speculative is not None and self._warmed.is_alone:
            num_free = free_rows(lambda count: runner.dummy_decode(count, block_size)[:1].cpu(), num_blocks)
        self._notes.keep(num_free)
        return WarmUp(
            seconds=self.largest.seconds,
            decode_batches=batches,
            prefill_tokens=self.largest.num_tokens,
            sampled_rows=batches[-1],
            activation_bytes=self.largest.activation_bytes,
            free_rows=num_free,
            is_remembered=found is not None,
        )

    def _run_prompts(self, runner: ModelRunner, kv_cache: KVCacheConfig) -> None:
        """Compute a prompt of one token and a long one, which have other kernels, and both with an empty adapter."""
        block_size, loras = self._config.cache.block_size, self._warmed.loras
        most, slots = self._config.scheduler.max_num_batched_tokens, kv_cache.num_blocks * block_size
        for num_tokens in (1, min(most, slots, kv_cache.max_model_len)):
            runner.dummy_run([num_tokens], block_size)
            if loras is not None:
                with loras.all_adapted(num_tokens):
                    runner.dummy_run([num_tokens], block_size)

    def _measure(self, lengths: list[int]) -> LargestStep:
        """Compute prompts of these lengths, in a pool of their own, and measure what that takes.

        On a CPU it computes one token in all layers, which reads every weight, and the whole step in as many layers
        as differ: each frees its activations before the next one, so the peak is the same in much less time.
        One thread computes a small step.
        """
        platform, warmed, block_size = self._platform, self._warmed, self._config.cache.block_size
        num_blocks = sum(-(-length // block_size) for length in lengths)
        num_layers = num_differing_layers(warmed.model) if platform.pool_is_on_host else None

        def run() -> None:
            runner = warmed.make_runner(num_blocks)
            if num_layers is not None:
                runner.dummy_run([1], block_size)
            logits = runner.dummy_run(lengths, block_size, num_layers)
            if not platform.pool_is_on_host:  # drawing takes memory of the device, too
                runner.dummy_sample(logits, _DRAWN)

        started = time.perf_counter()
        with one_thread(num_layers is not None and self._is_small(sum(lengths), num_layers)):
            peak = platform.peak_of(run) + self._row_bytes(sum(lengths))
        # A device holds the whole pool, a host the pages that were written.
        num_slots = sum(lengths) if platform.pool_is_on_host else num_blocks * block_size
        kv_bytes = num_slots * (warmed.layers.written_bytes_per_token(num_layers) + warmed.draft_bytes_per_token)
        kv_bytes += warmed.model.state_bytes
        return LargestStep(sum(lengths), max(0, peak - kv_bytes), time.perf_counter() - started)

    def _is_small(self, num_tokens: int, num_layers: int) -> bool:
        """Return whether one thread of the host computes so many tokens in so many layers in about half a second."""
        return self._platform.pool_is_on_host and is_small_step(num_tokens, num_layers, self._warmed.model.hidden_size)

    def _row_bytes(self, num_tokens: int) -> int:
        """Return the size of rows of images, as float32, that stand for so many tokens; 0 if prompts have none."""
        media, hidden_size = self._warmed.media, self._warmed.model.hidden_size
        if media is not None and media.cross_rows:  # of one prompt at a time, with their keys and values
            return 3 * media.cross_rows * hidden_size * 4
        return 0 if media is None else num_tokens * media.levels * hidden_size * 4
