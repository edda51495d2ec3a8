"""Makes the recordings of steps that a device has."""

from ..attention.attention_backend import AttentionBackend
from ..attention.fixed_plan import make_fixed_plan
from ..platform.platform import Platform
from .recorded_model import MOST_TOKENS, RecordedModel
from .recorded_steps import RecordedSteps


def make_recorded_steps(
    backend: AttentionBackend, platform: Platform, most_rows: int, most_blocks: int
) -> RecordedSteps | None:
    """Return graphs on a GPU and recordings of kernel calls on a CPU; None: the backend's steps are not recorded.

    ``most_rows``: requests of a step; ``most_blocks``: of a request, in one group of layers.
    """
    capture = platform.make_capture()
    if capture is not None:
        from ..cuda.step_graphs import make_step_graphs

        return make_step_graphs(backend, most_rows, most_blocks, platform.device, capture)
    plan = make_fixed_plan(backend, MOST_TOKENS, most_blocks)
    return None if plan is None else RecordedModel(plan)
