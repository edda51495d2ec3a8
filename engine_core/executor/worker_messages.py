"""Messages between an executor and its workers' processes: msgpack over one socket pair for each worker."""

import enum

import msgspec

from ..data.config import EngineConfig
from ..data.kv_cache_config import KVCacheConfig
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput
from ..wire.array_arena import ArenaAddress


class WorkerHello(msgspec.Struct, tag="HELLO"):
    """Reports to the executor that the process runs."""

    pid: int


class WorkerInit(msgspec.Struct, tag="INIT"):
    """Configures a worker."""

    config: EngineConfig
    """That of this rank."""
    rank: int
    arrays: ArenaAddress | None
    """Shared memory with the large arrays of steps, which each rank reads; None if they come in frames."""
    pool_fd: int | None
    """Inherited descriptor of the memory for all ranks' KV pools; None if no KV moves."""


class WorkerReady(msgspec.Struct, tag="READY"):
    """Reports to the executor that the worker answers calls from now on."""


class WorkerFailed(msgspec.Struct, tag="FAILED"):
    """Reports to the executor that the worker cannot start.

    Attributes:
        is_config: Whether the configuration is at fault, so that another start would fail in the same way.
    """

    error: str
    is_config: bool


class WorkerRequestType(enum.Enum):
    """Is the first frame of every message to a worker after the handshake."""

    EXECUTE = b"\x00"
    """A SchedulerOutput. It is not answered: an error is the answer to the SAMPLE that follows."""
    SAMPLE = b"\x01"
    """A SampleCall, which ends the latest step. The output rank answers, and every rank that failed; where KV moves,
    every rank answers."""
    CALL = b"\x02"
    """A WorkerCall. Every rank answers."""
    POOL = b"\x03"
    """A PoolCall. Every rank answers."""


class SampleCall(msgspec.Struct, array_like=True, gc=False):
    """Calls ``Worker.sample_tokens``."""

    call_id: int
    grammar: GrammarOutput | None


class WorkerCall(msgspec.Struct, array_like=True, gc=False):
    """Calls a method of ``WORKER_METHODS`` by name."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class PoolCall(msgspec.Struct, array_like=True, gc=False):
    """Calls ``Worker.initialize_kv_cache`` with the rank's part of the memory for KV pools.

    The result is a ``RankPool``.
    """

    call_id: int
    kv_cache: KVCacheConfig
    part_bytes: int
    """Size of a rank's part; that of rank r begins at r times it."""


class WorkerErrorKind(enum.IntEnum):
    """Classifies an answer without a result."""

    FAILED = 1
    """The worker failed."""
    VALUE = 2
    """The caller made a mistake: it gets a ``ValueError``."""


class WorkerReply(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Answers the SAMPLE, CALL or POOL with the same id."""

    call_id: int
    output: ModelRunnerOutput | None = None
    """The output of a SAMPLE, from the output rank."""
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    """The result of a CALL or POOL."""
    error_kind: WorkerErrorKind | None = None
    error: str = ""
