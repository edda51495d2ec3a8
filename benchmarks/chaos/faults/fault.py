"""Names the faults of a campaign and the parts that they meet."""

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """Names what happens to a part."""

    KILL = "kill"
    """SIGKILL."""
    TERM = "term"
    """SIGTERM, after which the supervisor starts the part again."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT after the duration of the fault."""
    STARVE = "starve"
    """The process runs only while no other one wants a processor, for the duration of the fault."""
    CUT = "cut"
    """No byte passes to or from the part for the duration of the fault."""
    CUT_TO = "cut-to"
    """No byte passes to the part; what it sends arrives."""
    CUT_FROM = "cut-from"
    """No byte passes from the part; what it is sent arrives."""
    RESET = "reset"
    """Every connection to the part is closed; new ones may be opened at once."""
    DELAY = "delay"
    """Every byte to and from the part arrives late."""

    @property
    def is_of_link(self) -> bool:
        """Whether the fault is in front of the part, not in its process."""
        return self in (Action.CUT, Action.CUT_TO, Action.CUT_FROM, Action.RESET, Action.DELAY)


@dataclass(frozen=True)
class Kind:
    """One kind of victim."""

    name: str
    service: str
    role: str | None = None
    """Role of an engine; None: any service."""
    process: str | None = None
    """The module of a process that the part has started (``core_main``, ``render_worker``); None: the part's own."""

    @property
    def is_helper(self) -> bool:
        """Whether the part starts the process when it needs one."""
        return self.process in (
            "render_worker",
            "encode_worker",
            "compiler_process",
            "decode_worker",
            "sound_worker",
            "tower_worker",
        )

    @property
    def is_of_texts(self) -> bool:
        """Whether the process runs only for chats, long texts or grammars, of which transcriptions have none."""
        return self.process in ("render_worker", "encode_worker", "compiler_process")

    @property
    def may_be_last(self) -> bool:
        """Whether the only part of this kind may meet a fault: a mesh has one coordinator."""
        return self.service == "coordinator"


_OFF_ENGINE = (
    *(Kind(name, name) for name in ("gateway", "tokenizer", "coordinator", "output_processor")),
    Kind("renderer", "tokenizer", process="render_worker"),
    Kind("encoder", "tokenizer", process="encode_worker"),
)
IMAGES = (
    Kind("image encoder", "encoder"),
    Kind("image decoder", "encoder", process="decode_worker"),
    Kind("image tower", "encoder", process="tower_worker"),
)
"""The kinds of a mesh whose model reads images, besides the others."""
SOUNDS = (
    Kind("sound encoder", "encoder"),
    Kind("sound decoder", "encoder", process="sound_worker"),
    Kind("sound tower", "encoder", process="tower_worker"),
)
"""The kinds of a mesh whose model reads sounds, besides the others."""
SHARED = frozenset(kind.name for kind in (*_OFF_ENGINE, *IMAGES, *SOUNDS))
"""Names of the kinds that every layout has."""
WHOLE = (
    *_OFF_ENGINE,
    Kind("engine", "engine", "both"),
    Kind("engine core", "engine", "both", "core_main"),
    Kind("worker", "engine", "both", "worker_main"),
    Kind("compiler", "engine", "both", "compiler_process"),
)
"""The kinds of a mesh whose engines compute whole requests, with worker processes."""
SPLIT = (
    *_OFF_ENGINE,
    Kind("prefill engine", "engine", "prefill"),
    Kind("prefill core", "engine", "prefill", "core_main"),
    Kind("decode engine", "engine", "decode"),
    Kind("decode core", "engine", "decode", "core_main"),
    Kind("prefill compiler", "engine", "prefill", "compiler_process"),
    Kind("decode compiler", "engine", "decode", "compiler_process"),
)
"""The kinds of a mesh with prefill and decode engines, whose workers run within their cores."""


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    action: Action
    kind: Kind
    seconds: float
    """How long it lasts; 0 for faults that are over at once."""
    choice: float
    """Chooses among the parts of the kind that may meet it, in [0, 1)."""


@dataclass
class Injection:
    """What became of one planned fault. Times count from the beginning of the faults, in seconds."""

    fault: Fault
    part: str
    pid: int
    began: float
    ended: float = 0.0
    """When it was taken back; for a kill, when the process was gone."""
    effect: str = ""
    """What was seen of it; empty: nothing was seen, so the fault did not take effect."""
    served_again: float | None = None
    """Seconds from its beginning until the part was SERVING again; None: it never stopped, or never came back."""

    @property
    def took_effect(self) -> bool:
        return bool(self.effect)
