"""What an executor and its workers' processes say to each other: msgpack over a socket pair for each worker."""

import enum
from typing import Final

import msgspec

from ..config import EngineConfig
from ..wire.array_arena import ArenaAddress
from ..wire.scheduler_output import GrammarOutput, ModelRunnerOutput

OUTPUT_RANK: Final = 0
"""The worker that answers for all: every rank computes every step, and one tells its tokens."""


class WorkerHello(msgspec.Struct, tag="HELLO"):
    """Worker to executor: the process is up."""

    pid: int


class WorkerInit(msgspec.Struct, tag="INIT"):
    """Executor to worker: what to become."""

    config: EngineConfig
    rank: int
    """In [0, world_size)."""
    world_size: int
    arrays: ArenaAddress | None
    """Where large arrays of steps lie, which each rank reads; None: in frames."""


class WorkerReady(msgspec.Struct, tag="READY"):
    """Worker to executor: calls are answered from here on."""


class WorkerFailed(msgspec.Struct, tag="FAILED"):
    """Worker to executor: it cannot start.

    Attributes:
        is_config: The configuration is at fault: another start would end the same way.
    """

    error: str
    is_config: bool


class WorkerRequestType(enum.Enum):
    """First frame of every message to a worker after the handshake."""

    EXECUTE = b"\x00"
    """A SchedulerOutput. Not answered: what goes wrong is the answer to SAMPLE."""
    SAMPLE = b"\x01"
    """A SampleCall, which ends the step executed last. The output rank answers, and every rank that failed."""
    CALL = b"\x02"
    """A WorkerCall. Every rank answers."""


class SampleCall(msgspec.Struct, array_like=True, gc=False):
    """``Worker.sample_tokens``."""

    call_id: int
    grammar: GrammarOutput | None


class WorkerCall(msgspec.Struct, array_like=True, gc=False):
    """A method of ``WORKER_METHODS``, by name."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class WorkerErrorKind(enum.IntEnum):
    """What an answer without a result means to the caller."""

    FAILED = 1
    """The worker cannot go on as it should."""
    VALUE = 2
    """The caller's mistake, as ``ValueError`` says it."""


class WorkerReply(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The answer to the SAMPLE or CALL of that id."""

    call_id: int
    output: ModelRunnerOutput | None = None
    """Of SAMPLE."""
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Of CALL."""
    error_kind: WorkerErrorKind | None = None
    error: str = ""
