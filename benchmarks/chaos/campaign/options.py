"""Defines the options and limits of a campaign, with a preset for each fault of the promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME

from ..faults.fault import Action, Kind

_Count = Annotated[int, Meta(ge=1)]
_Limit = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class ChaosOptions(Struct, frozen=True):
    """Describes a campaign; fields with a text are options of ``tokenloom chaos``. A limit of None is not checked."""

    layout: Annotated[
        Literal["both", "whole", "split"],
        "whole: engines that compute whole requests; split: prefill and decode engines; both: one after the other.",
    ] = "both"
    worker: Annotated[
        Literal["model", "hash"], "model: the demo model on the CPU; hash: an engine without a model, for long runs."
    ] = "model"
    model: Annotated[
        str,
        "A model's folder in place of the demo model. With one that reads images or sounds, encoders join the parts, "
        "and images or sounds the requests; those to a Whisper model are transcriptions, in the layout whole.",
    ] = ""
    drafts: Annotated[
        _Limit,
        "Most drafts of a request in a step (--speculative-config, ngram); engines with the demo model compute bit by "
        "bit as without drafts then (--batch-invariant). 0: none.",
    ] = 0
    bfloat16: Annotated[
        bool, "Engines compute in bfloat16, and bit by bit the same in every batch (--batch-invariant)."
    ] = False
    hold_connections: Annotated[
        bool,
        "Gateways hold their connections and keep copies of requests (--hold-connections, --journal-copies 2): no "
        "request of a plain HTTP client is excused with its gateway.",
    ] = False
    link_delay: Annotated[
        _Seconds,
        "Seconds by which each piece is late between any two parts and between clients and gateways, in each "
        "direction. Parts then listen on TCP ports, and KV moves over TCP.",
    ] = 0.0
    parts: Annotated[
        Annotated[int, Meta(ge=2, le=8)], "Parts of each kind, except for the coordinator, which is one."
    ] = 2
    requests: Annotated[_Count, "Least number of requests under faults, of both layouts together."] = 2000
    each: Annotated[_Count, "Faults of each kind, of both layouts together."] = 10
    kinds: Annotated[tuple[str, ...], "Only these kinds of parts, by name; by default all."] = ()
    every: Annotated[_Seconds, "Seconds between the beginnings of faults; a fault that lasts ends first."] = 5.0
    duration: Annotated[_Seconds, "Seconds that a freeze, a cut, a delay or an outage lasts, a pause at most."] = 10.0
    seed: Annotated[int, "Seed of the plan and of the requests."] = 0
    cases: Annotated[_Count, "Different requests; each is first sent undisturbed, for its reference."] = 44
    min_tokens: Annotated[_Count, "Least length of an answer that nothing else ends."] = 100
    max_tokens: Annotated[_Count, "Greatest length of such an answer."] = 400
    step_seconds: Annotated[_Seconds, "Seconds of a step of the hash worker."] = 0.01
    timeout: Annotated[_Seconds, "Seconds that a request may take before its client gives up."] = 90.0
    concurrency: Annotated[_Count, "Most requests at once."] = 64
    logprob_tolerance: Annotated[_Seconds, "Difference of log probabilities that is not an error."] = 0.05
    max_failed: Annotated[_Limit | None, "Limit: failed requests."] = None
    min_success: Annotated[_Share | None, "Limit: least share of requests that succeed."] = None
    max_wrong: Annotated[_Limit, "Limit: answers that differ from the reference."] = 0
    max_refused: Annotated[_Limit | None, "Limit: refused connections."] = None
    max_cut: Annotated[_Limit | None, "Limit: streams that end without an error event while their gateway runs."] = 0
    max_added_p99: Annotated[_Seconds | None, "Limit: added latency that 99 % of requests stay within."] = None
    max_pause: Annotated[_Seconds | None, "Limit: longest added pause of an answer, the wait for it included."] = None
    max_added_ttft_p99: Annotated[
        _Seconds | None, "Limit: added p99 TTFT during the faults, without their first 2 s."
    ] = None

    @property
    def checkpoint(self) -> Path:
        """The folder of the model."""
        return Path(self.model) if self.model else DEMO_MODEL

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.checkpoint.name if self.model else DEMO_MODEL_NAME


@dataclass(frozen=True)
class Campaign:
    """A preset: what happens, and the options that it begins with."""

    text: str
    actions: tuple[Action, ...]
    options: ChaosOptions
    services: tuple[str, ...] = ()
    """Only parts of these services meet faults; empty: all."""
    processes: bool = True
    """Whether the processes that parts start are victims of their own."""
    in_order: bool = False
    """Whether the parts are taken one after the other instead of at random."""
    is_outage: bool = False
    """Whether all engines are lost at once."""
    is_pause: bool = False
    """Whether the whole mesh stops at once, for times of up to the duration."""
    is_stutter: bool = False
    """Whether every process of the mesh is stopped and continued by itself, for times of up to the duration."""
    streams_only: bool = False

    @property
    def is_of_all(self) -> bool:
        """Whether a fault is of many parts at once, so that it is always possible."""
        return self.is_outage or self.is_of_host

    @property
    def is_of_host(self) -> bool:
        """Whether the whole mesh lacks processors for a while."""
        return self.is_pause or self.is_stutter

    @property
    def is_of_links(self) -> bool:
        """Whether its faults need proxies in front of the parts."""
        return any(action.is_of_link for action in self.actions)

    def kinds(self, layout: Sequence[Kind], names: Sequence[str]) -> list[Kind]:
        """Return the kinds of a layout that the campaign meets; with ``names``, only these."""
        return [
            kind
            for kind in layout
            if (not self.services or kind.service in self.services)
            and (self.processes or kind.process is None)
            and (not names or kind.name in names)
        ]


CAMPAIGNS: Mapping[str, Campaign] = {
    "kill": Campaign(
        "SIGKILL to a random part or process every 5 s.",
        (Action.KILL,),
        ChaosOptions(max_failed=0, max_refused=0, max_added_p99=3.0),
    ),
    "freeze": Campaign(
        "SIGSTOP to a random part or process, SIGCONT 10 s later.",
        (Action.FREEZE,),
        ChaosOptions(requests=1000, each=2, cases=22, min_success=0.999, max_pause=4.0),
    ),
    "tree": Campaign(
        "Every process of the tree is killed, stopped for a while and starved of processors, in turns.",
        (Action.KILL, Action.FREEZE, Action.STARVE),
        ChaosOptions(requests=3000, each=30, every=1.5, duration=3.0, max_failed=0),
    ),
    "cut": Campaign(
        "The links of a random part are cut, cut in one direction, reset or delayed.",
        (Action.CUT, Action.CUT_TO, Action.CUT_FROM, Action.RESET, Action.DELAY),
        ChaosOptions(requests=1000, each=5, cases=22, duration=6.0, min_success=0.999, max_pause=4.0),
        processes=False,
    ),
    "outage": Campaign(
        "All engines are killed at once and return 10 s later.",
        (Action.KILL,),
        ChaosOptions(requests=200, each=1, every=30.0, cases=22, max_failed=0),
        services=("engine",),
        processes=False,
        is_outage=True,
    ),
    "pause": Campaign(
        "Every process of the mesh is stopped at once, for 1 to 8 s, as on a machine that is moved or starved.",
        (Action.FREEZE,),
        ChaosOptions(requests=1000, each=20, every=12.0, duration=8.0, cases=22, max_failed=0),
        is_pause=True,
    ),
    "stutter": Campaign(
        "Every process of the mesh is stopped and continued at random by itself, for 10 to 20 s; in between a gateway, "
        "an output processor or the coordinator is killed, in turns.",
        (Action.FREEZE,),
        ChaosOptions(requests=1000, each=16, every=25.0, duration=20.0, cases=22, max_failed=0),
        is_stutter=True,
    ),
    "rolling": Campaign(
        "SIGTERM to every part, one after the other.",
        (Action.TERM,),
        ChaosOptions(requests=400, each=1, every=1.0, cases=22, max_failed=0, max_refused=0),
        processes=False,
        in_order=True,
    ),
    "coordinator": Campaign(
        "The coordinator is stopped for 10 s.",
        (Action.FREEZE,),
        ChaosOptions(requests=600, each=4, every=20.0, cases=22, max_tokens=300, max_failed=0, max_added_ttft_p99=0.05),
        services=("coordinator",),
        streams_only=True,
    ),
}
"""The campaigns by name."""
