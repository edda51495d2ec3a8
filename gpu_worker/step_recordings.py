"""Recordings of steps, as the runner needs them: of kernel calls on a CPU, or graphs on a GPU."""

from typing import Protocol

from torch import Tensor

from .attention.attention_backend import AttentionBackend, KVCache
from .attention.states import StatePlan
from .batch.input_batch import InputBatch, StepInputs
from .cpu_graphs.fixed_plan import make_fixed_plan
from .cpu_graphs.recorded_model import MOST_TOKENS, RecordedModel
from .device.device_link import Event
from .models.model import LanguageModel
from .platform.platform import Platform
from .sampler.device.sampling_arrays import SamplingRows


class StepRecordings(Protocol):
    """Computes steps of a model from recordings."""

    @property
    def computes_every_step(self) -> bool:
        """Whether it also computes the steps that cannot be recorded, such as those whose experts are chosen by row."""

    @property
    def sampling_rows(self) -> SamplingRows | None:
        """What the rows that draw in the latest step ask for, on the device; None: the host has to send it."""

    def compute(
        self, model: LanguageModel, inputs: StepInputs, kv_caches: list[KVCache], *, adapted: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step. Returns the last hidden states [T, hidden_size] and the logits [S, vocab] of the rows that
        draw, which hold until the next step; None: the step must be computed as ever. ``adapted``: rows have LoRA
        adapters, or the host reads the choices of experts."""

    def record_ahead(self, model: LanguageModel, kv_caches: list[KVCache], states: StatePlan | None = None) -> None:
        """Make the recordings that are worth it before the first request. ``states``: a plan over the model's slots;
        None: its layers keep no state."""

    def event(self) -> Event | None:
        """Return what occurs when the latest step has ended; None: it has, or nothing says so."""

    def forget(self) -> None:
        """Drop all recordings: the weights or the KV caches are others from now on."""


def make_recorded_steps(
    backend: AttentionBackend,
    platform: Platform,
    batch: InputBatch,
    most_tokens: int,
    *,
    eager: bool,
    shares: bool = False,
) -> StepRecordings | None:
    """Return what computes steps with one copy and graphs on a GPU, or from recordings of kernel calls on a CPU; None:
    the backend's steps are computed as ever.

    Args:
        batch: Whose steps they are.
        most_tokens: Of a step.
        eager: Whether no step is recorded. On a GPU it costs one copy nevertheless.
        shares: Whether requests of a GPU's decode step may read the keys together that they share.
    """
    tools = platform.make_step_tools()
    if tools is not None:
        from .cuda.device_steps import make_device_steps

        capture = None if eager else platform.make_capture()
        return make_device_steps(backend, batch, most_tokens, platform.device, tools, capture, shares=shares)
    if eager:
        return None
    table = batch.block_table
    plan = make_fixed_plan(backend, MOST_TOKENS, table.block_ids.shape[1] // table.num_groups, batch.gathered)
    return None if plan is None else RecordedModel(plan)
