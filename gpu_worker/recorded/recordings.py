"""Makes the recordings of steps that a device has."""

from ..attention.attention_backend import AttentionBackend
from ..attention.fixed_plan import make_fixed_plan
from ..batch.input_batch import InputBatch
from ..platform.platform import Platform
from .recorded_model import MOST_TOKENS, RecordedModel
from .recorded_steps import RecordedSteps


def make_recorded_steps(
    backend: AttentionBackend,
    platform: Platform,
    batch: InputBatch,
    most_tokens: int,
    *,
    eager: bool,
) -> RecordedSteps | None:
    """Return what computes steps with one copy and graphs on a GPU, or from recordings of kernel calls on a CPU; None:
    the backend's steps are computed as ever.

    Args:
        batch: Whose steps they are.
        most_tokens: Of a step.
        eager: Whether no step is recorded. On a GPU it costs one copy nevertheless.
    """
    tools = platform.make_step_tools()
    if tools is not None:
        from ..cuda.device_steps import make_device_steps

        capture = None if eager else platform.make_capture()
        return make_device_steps(backend, batch, most_tokens, platform.device, tools, capture)
    if eager:
        return None
    table = batch.block_table
    plan = make_fixed_plan(backend, MOST_TOKENS, table.block_ids.shape[1] // table.num_groups, batch.gathered)
    return None if plan is None else RecordedModel(plan)
