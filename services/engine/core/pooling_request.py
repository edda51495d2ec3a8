"""Turns the pooling parameters of an ``AddRequest`` into the engine core's: checked against what the model pools."""

from tokenloom.engine_core.data.core_pooling_params import LateInteraction, PoolingParams, PoolingTask
from tokenloom.request import validation
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import engine_pb2, types_pb2

_MAX_QUERY_ID_CHARS = 256


def to_core_pooling(add: engine_pb2.AddRequest, limits: types_pb2.ModelLimits) -> PoolingParams:
    """Return the parameters for the core. Raises ``InvalidArgument`` naming the field."""
    wire = add.pooling_params
    if wire.task not in limits.pooling_tasks:
        is_known = wire.task in types_pb2.PoolingTask.values()
        wanted = types_pb2.PoolingTask.Name(wire.task).removeprefix("POOLING_TASK_").lower() if is_known else wire.task
        raise InvalidArgument(
            f"task {wanted} is not among this model's pooling tasks: {_names(limits)}", "pooling_params.task"
        )
    validation.check_pooling_prompt(add.prompt.token_ids, limits, field="prompt")
    if add.prompt.embeds:
        raise InvalidArgument("prompt embeddings cannot be pooled; send token ids", "prompt_embeds")
    if add.accepted_token_ids or add.hold_kv or add.HasField("kv_source"):
        raise InvalidArgument("a pooling request has no output tokens and moves no KV", "pooling_params")
    if wire.first_part_tokens > len(add.prompt.token_ids):
        raise InvalidArgument(
            f"first_part_tokens is {wire.first_part_tokens}, but the prompt has {len(add.prompt.token_ids)} tokens",
            "first_part_tokens",
        )
    return PoolingParams(
        task=PoolingTask(wire.task),
        dimensions=_dimensions(wire, limits),
        use_activation=wire.use_activation if wire.HasField("use_activation") else None,
        first_part_tokens=wire.first_part_tokens,
        late_interaction=_late_interaction(wire),
    )


def _dimensions(wire: types_pb2.PoolingParams, limits: types_pb2.ModelLimits) -> int | None:
    if not wire.HasField("dimensions"):
        return None
    if not limits.matryoshka:
        raise InvalidArgument("dimensions: this model's vectors cannot be shortened; leave it out", "dimensions")
    if not wire.dimensions:
        raise InvalidArgument("dimensions must be at least 1", "dimensions")
    return wire.dimensions


def _late_interaction(wire: types_pb2.PoolingParams) -> LateInteraction | None:
    if not wire.HasField("late_interaction"):
        return None
    part = wire.late_interaction
    if wire.task != types_pb2.POOLING_TASK_TOKEN_EMBED:
        raise InvalidArgument("late_interaction is only possible with the task token_embed", "late_interaction")
    if not 0 < len(part.query_id) <= _MAX_QUERY_ID_CHARS:
        raise InvalidArgument("late_interaction.query_id is empty or too long", "late_interaction")
    return LateInteraction(part.query_id, part.num_documents)


def _names(limits: types_pb2.ModelLimits) -> str:
    return ", ".join(PoolingTask(task).name.lower() for task in limits.pooling_tasks) or "none"


def check_generates(limits: types_pb2.ModelLimits) -> None:
    """Raise ``InvalidArgument`` if the model generates no tokens."""
    if limits.HasField("generates") and not limits.generates:
        raise InvalidArgument(f"this model generates no tokens; its pooling tasks are: {_names(limits)}", "model")
