"""Options of engines that are one of a few words."""

from enum import StrEnum


class Device(StrEnum):
    """``auto`` is a GPU where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class SchedulingPolicy(StrEnum):
    """Who goes first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class Dtype(StrEnum):
    """``auto`` keeps the checkpoint's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """How layers' matrices are rounded."""

    INT8_DYNAMIC = "int8-dynamic"


class WorkerKind(StrEnum):
    """``hash`` computes no model: each token is a hash of those before it, to try the mesh without torch.

    ``timed`` only waits, as long as ``TOKENLOOM_HASH_STEP_SECONDS`` and ``TOKENLOOM_HASH_TOKEN_SECONDS`` say.
    """

    CPU = "cpu"
    HASH = "hash"
    TIMED = "timed"
