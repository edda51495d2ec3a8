"""Options of engines of several workers, and of groups of engines."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenloom.process.plugins import plugged

_Steps = Annotated[int, Meta(ge=1)]


class EplbConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When experts are moved, and how many copies there are. Users write it as JSON (names and defaults as in vLLM,
    apart from ``move_bytes``)."""

    window_size: _Steps = 1000
    """How many of the latest steps count as an expert's load."""
    step_interval: _Steps = 3000
    """Steps from one plan to the next."""
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    """Copies of experts in each layer, on all ranks together, beside one of each. With the model's experts they must
    be a multiple of the ranks."""
    log_balancedness: bool = False
    """Log with each plan how evenly the ranks were loaded."""
    move_bytes: Annotated[int, Meta(ge=1 << 10)] = 32 << 20
    """Most bytes of weights that a rank receives in a step."""


class ExpertPeers(Struct, frozen=True):
    """The workers that share the experts of a data-parallel group from now on."""

    index: int
    """Of this engine among the members of the group."""
    workers: list[list[str]]
    """``HOST:PORT`` of each worker, by member and rank in its engine."""
    epoch: int
    """Each change of the members has its own, so that none is taken for another one."""
    key: bytes
    """By which the workers prove to each other that they belong to the group."""


_Count = Annotated[int, Meta(ge=1)]
_Size = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(gt=0)]


class ParallelConfig(Struct, frozen=True):
    """Where the workers run, and how arrays move between processes."""

    tensor_parallel_size: Annotated[
        _Count,
        "Workers that compute each layer together: each holds a part of the heads, of the MLP and of the KV cache.",
    ] = 1
    pipeline_parallel_size: Annotated[
        _Count, "Stages of the model: each has a part of the layers, and --tensor-parallel-size workers."
    ] = 1
    decode_context_parallel_size: Annotated[
        _Count,
        "Of the workers of a stage, over how many the tokens of each sequence are spread: 1 (each keeps the KV of its "
        "heads for all tokens) or --tensor-parallel-size (each keeps the KV of all heads for a part of the tokens).",
    ] = 1
    prefill_context_parallel_size: Annotated[
        _Count,
        "Copies of the model, each over as many workers as the other sizes say and with the KV cache of all tokens: "
        "they divide the tokens of long prompts among them, and compute all other steps side by side.",
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        "Give each worker of a stage whole experts of a model with experts, instead of a part of every expert; with "
        "--data-parallel-size, spread the experts over the workers of all engines of the group.",
    ] = False
    enable_eplb: Annotated[
        bool,
        "Move experts between the workers or engines over which --enable-expert-parallel spreads them, so that all are "
        "loaded evenly.",
    ] = False
    eplb_config: Annotated[
        EplbConfig | None,
        "How --enable-eplb balances: a JSON object with window_size, step_interval, num_redundant_experts, "
        "log_balancedness and move_bytes (docs/operate/scaling.md).",
    ] = None
    distributed_executor_backend: Annotated[
        str,
        "Where the workers run: uni: one in the core's process; mp: each in a process of its own on this machine; ray: "
        "each in an actor on any machine of a Ray cluster; auto: uni for one worker, mp for several; or a plugin, as "
        "PACKAGE:NAME.",
        Meta(extra=plugged("executors", ("auto", "uni", "mp", "ray"))),
    ] = "auto"
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        "Where the core of the engine runs, which schedules its steps: mp: in a process on the engine's machine; ray: "
        "in an actor on any machine of a Ray cluster, with its workers (docs/operate/scaling.md).",
    ] = "mp"
    rank: int = 0
    """Of the worker that this configuration is for, in [0, world_size): (copy * pipeline_parallel_size + stage) *
    tensor_parallel_size + its place in the stage."""
    rendezvous: str = ""
    """Where the workers find each other: the path of a file on their machine, or ``HOST:PORT``, which rank 0 serves.
    Empty: there is one worker."""
    array_arena_bytes: Annotated[
        _Size,
        "Shared memory that the front and the core each use to pass large arrays (prompt embeddings, "
        "masks) to the next process; larger arrays, and with 0 all arrays, are sent over sockets.",
    ] = 256 << 20
    data_parallel_size: Annotated[
        _Count, "Engines of a data-parallel group: each has all layers, and its own requests and KV cache."
    ] = 1
    data_parallel_rank: Annotated[_Size, "Number of this engine in its data-parallel group."] = 0
    data_parallel_group: Annotated[
        str, "Name of the data-parallel group; by default data-parallel if there are several ranks."
    ] = ""
    data_parallel_address: Annotated[
        str,
        "Where rank 0 of a mixture-of-experts model listens for the other ranks of its group: unix:/path, "
        "127.0.0.1:port, or with --data-parallel-secret-file HOST:PORT of its machine. Ranks of other models need no "
        "address.",
    ] = ""
    data_parallel_secret_file: Annotated[
        str,
        "File with a secret of at least 16 bytes, the same for all ranks, with which they prove to rank 0 on another "
        "machine that they belong to its group.",
    ] = ""
    data_parallel_timeout: Annotated[
        _Seconds, "Seconds that a rank tries to reach its group after it has loaded the model."
    ] = 300.0

    @property
    def group_id(self) -> str:
        """The name of the data-parallel group; empty: the engine belongs to none."""
        return self.data_parallel_group or ("data-parallel" if self.data_parallel_size > 1 else "")

    @property
    def request_arena_bytes(self) -> int:
        """Shared memory for large arrays of requests; 0 for a core that may be on another machine."""
        return 0 if self.data_parallel_backend == "ray" else self.array_arena_bytes

    @property
    def spreads_experts_over_engines(self) -> bool:
        """Whether each engine of the data-parallel group holds a part of the experts of each layer."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def world_size(self) -> int:
        """Return how many workers the engine has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def output_rank(self) -> int:
        """Return the rank that samples and reports the tokens: the first one of the last stage."""
        return self.tensor_parallel_size * (self.pipeline_parallel_size - 1)
