"""Names the tasks of pooling requests for clients."""

from typing import Final, cast

from tokenloom.v1 import types_pb2

_PREFIX: Final = "POOLING_TASK_"
TASKS: Final[dict[str, types_pb2.PoolingTask]] = {
    name.removeprefix(_PREFIX).lower(): cast(types_pb2.PoolingTask, task)
    for name, task in types_pb2.PoolingTask.items()
    if task
}
"""The tasks by their names, as in vLLM."""
NO_GENERATION: Final = "the model does not generate text; its pooling tasks are: {}"


def task_name(task: types_pb2.PoolingTask) -> str:
    return types_pb2.PoolingTask.Name(task).removeprefix(_PREFIX).lower()


def task_names(limits: types_pb2.ModelLimits) -> str:
    """Return the tasks that the model serves."""
    return ", ".join(task_name(task) for task in sorted(limits.pooling_tasks)) or "none"
