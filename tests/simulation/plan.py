"""Draws what happens in one run from its seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE

from .encoders import MARK, file_of, with_rows
from .reference import Expected, expected


@dataclass(frozen=True)
class Ask:
    """Describes one request of a client.

    Attributes:
        at: Seconds after the mesh is whole.
        timeout: Seconds; every request has a deadline.
        cancel_after: Seconds after which the client goes away; None: it stays.
        stop: Stop strings.
        expected: What each sample must be.
        gateway: Index of the gateway that it prefers.
        resumes: The client continues its answer on another gateway when its own is lost.
        is_chat: A tokenizer renders and encodes the prompt.
        has_grammar: Each engine that computes it compiles a grammar of its own for it.
        files: What the marks in the prompt stand for.
        cut_after: Seconds after which the client's connection to its gateway ends, so that it resumes; None: never.
        patience: Seconds after which the client leaves a gateway that has not ended its answer, and repeats its request
            under the same key at the next one, each time; it waits twice as long where that has brought nothing. None:
            it stays, and has no key.
        unnoticed: Seconds after which a gateway learns that the client has left it.
        away: Seconds that pass until the client calls the next gateway.
    """

    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    expected: Expected
    num_samples: int = 1
    timeout: float = 30.0
    cancel_after: float | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    gateway: int = 0
    resumes: bool = False
    cut_after: float | None = None
    patience: float | None = None
    unnoticed: float = 0.0
    away: float = 0.1
    is_chat: bool = False
    has_grammar: bool = False
    files: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Describes one fault.

    Attributes:
        kind: One of :data:`tests.simulation.faults.KINDS`.
        at: Seconds after the mesh is whole.
        lasts: Seconds until the part is started again or thawed, or the link is healed.
        target: The part, or the sender's end of the link.
        other: The receiver's end of the link; empty for faults of a part.
    """

    kind: str
    at: float
    lasts: float
    target: str
    other: str = ""

    def __str__(self) -> str:
        where = f"{self.target} > {self.other}" if self.other else self.target
        return f"{self.kind} {where} at {self.at:.2f} s for {self.lasts:.2f} s"


@dataclass(frozen=True)
class Call:
    """Describes one call of an operator.

    Attributes:
        kind: pause, resume, sleep or wake_up.
        at: Seconds after the mesh is whole.
    """

    kind: str
    at: float


@dataclass(frozen=True)
class Plan:
    """Describes a run: the mesh, what clients ask, and what goes wrong.

    Attributes:
        step_seconds: How long a step of an engine takes.
        copy_seconds: How long a batch of KV blocks takes to copy.
        num_blocks: KV blocks of each engine.
        spares: No fault takes away the last engine or output processor.
        num_coordinators: One holds the lease, the others stand by.
        state_chunk: Of the layer of the engines' model that keeps a state; 0: none does.
        state_bytes: How large its states are.
        num_encoders: Those that have the files of requests; 0: there are none.
        rows_bytes: Room for rows at each engine.
        migrates: An operator moves running requests from engine to engine all the time, as engines do that drain.
        rebalances: So does the coordinator, away from engines that are hot or short of blocks.
        copies_journals: Gateways keep a copy of each request at a second output processor.
        stutters: All parts may be stopped at the same time.
    """

    seed: int
    roles: tuple[str, ...]
    num_gateways: int
    num_output_processors: int
    mean_delay: float
    step_seconds: float
    copy_seconds: float
    num_blocks: int
    spares: bool
    num_coordinators: int = 1
    num_tokenizers: int = 1
    state_chunk: int = 0
    state_bytes: int = STATE_BYTES
    num_encoders: int = 0
    rows_bytes: int = 1 << 20
    migrates: bool = False
    rebalances: bool = False
    copies_journals: bool = False
    stutters: bool = False
    asks: list[Ask] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def gateways(self) -> list[str]:
        return [f"gateway-{index}" for index in range(self.num_gateways)]

    @property
    def engines(self) -> list[str]:
        return [f"engine-{index}" for index in range(len(self.roles))]

    @property
    def output_processors(self) -> list[str]:
        return [f"output_processor-{index}" for index in range(self.num_output_processors)]

    @property
    def coordinators(self) -> list[str]:
        return [f"coordinator-{index}" for index in range(self.num_coordinators)]

    @property
    def tokenizers(self) -> list[str]:
        return [f"tokenizer-{index}" for index in range(self.num_tokenizers)]

    @property
    def encoders(self) -> list[str]:
        return [f"encoder-{index}" for index in range(self.num_encoders)]

    @property
    def is_split(self) -> bool:
        return "prefill" in self.roles


ROLES = (
    ("both", "both"),
    ("both", "both", "both"),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode", "decode"),
)
SECONDS = 2.5
"""Requests and faults begin within so many seconds."""
_STUTTER_SECONDS = 12.0
"""For so long all parts are stopped and continued, where they are."""
LINK_FAULTS = ("cut", "one_way_cut", "reset")
CORE_FAULTS = ("core_crash", "hang")
_PROMPT_IDS = range(2, 400)
_LONGEST = 127
"""Tokens of prompt and output, below the context of the engines."""


def make_plan(seed: int, kinds: Sequence[str]) -> Plan:
    """Return the plan of a seed, with faults of these kinds. In some runs blocks are so scarce that leases end."""
    random = Random(f"plan {seed}")
    is_tight = random.random() < 0.3
    plan = Plan(
        seed=seed,
        roles=random.choice(ROLES),
        num_gateways=random.choice((1, 1, 2)),
        num_output_processors=2,
        mean_delay=random.choice((0.0003, 0.001, 0.004)),
        step_seconds=random.choice((0.01, 0.02, 0.03)),
        copy_seconds=0.2 if is_tight else random.choice((0.002, 0.05)),
        num_blocks=10 if is_tight else random.choice((24, 64)),
        spares=random.random() < 0.8,
    )
    prefixes = [_draw_ids(random, 16) for _ in range(2)]
    lengths = (24, 60) if is_tight else (1, 40)
    count = random.randrange(10, 16) if is_tight else random.randrange(6, 12)
    plan.asks.extend(_draw_ask(random, prefixes, lengths, plan.num_gateways) for _ in range(count))
    plan.asks.sort(key=lambda ask: ask.at)
    plan.faults.extend(_draw_fault(random, plan, kinds) for _ in range(random.randrange(1, 4)))
    plan.faults.sort(key=lambda fault: fault.at)
    return plan


def with_standby(plan: Plan) -> Plan:
    """Return the plan with a second coordinator. Faults of coordinators come to either of them, and one or two more
    at any time."""
    random = Random(f"standby {plan.seed}")
    pair = replace(plan, num_coordinators=2)

    def drawn(fault: Fault) -> Fault:
        if not fault.target.startswith("coordinator"):
            return fault
        return replace(fault, target=random.choice(pair.coordinators))

    def more() -> Fault:
        kind, lasts = random.choice(("crash", "crash", "drain", "freeze")), random.uniform(0.1, 5.0)
        return Fault(kind, random.uniform(0.0, SECONDS), lasts, random.choice(pair.coordinators))

    faults = [*map(drawn, plan.faults), *(more() for _ in range(random.randrange(1, 3)))]
    return replace(pair, faults=sorted(faults, key=lambda fault: fault.at))


def with_states(plan: Plan) -> Plan:
    """Return the plan with a model that keeps a state, large or small, in chunks of several tokens or of one. Prompts
    begin alike more often, and blocks are scarce, so that states are hit and requests are preempted."""
    random = Random(f"states {plan.seed}")
    chunk, nbytes = random.choice((1, 8)), random.choice((STATE_BYTES, 10_000))
    beginning = _draw_ids(random, 40)

    def drawn(ask: Ask) -> Ask:
        prompt = beginning[: random.choice((0, 17, 33, 40))] + ask.prompt[-30:]
        max_tokens = min(ask.max_tokens, 40)
        stop = _draw_stop(random, prompt, max_tokens, chunk) if ask.stop else ()
        wanted = expected(prompt, max_tokens, stop, chunk)
        num_samples = max(ask.num_samples, random.choice((1, 1, 3)))
        return replace(ask, prompt=prompt, max_tokens=max_tokens, stop=stop, expected=wanted, num_samples=num_samples)

    return replace(
        plan,
        num_blocks=random.choice((10, 14, 24)),
        state_chunk=chunk,
        state_bytes=nbytes,
        asks=[drawn(ask) for ask in plan.asks],
    )


def with_migrations(plan: Plan) -> Plan:
    """Return the plan with longer outputs, which move from engine to engine, and with faults of engines meanwhile."""
    random = Random(f"migrations {plan.seed}")

    def drawn(ask: Ask) -> Ask:
        tokens, hashed = with_rows(ask.prompt, ask.files)
        max_tokens = min(random.randrange(20, 60), _LONGEST - len(tokens))
        stop = _draw_stop(random, tokens, max_tokens, plan.state_chunk, hashed=hashed) if ask.stop else ()
        wanted = expected(tokens, max_tokens, stop, plan.state_chunk, hashed=hashed)
        return replace(ask, max_tokens=max_tokens, stop=stop, expected=wanted)

    def fault() -> Fault:
        kind, lasts = random.choice(("crash", "drain", "drain", "core_crash", "freeze")), random.uniform(0.1, 2.0)
        return Fault(kind, random.uniform(0.0, SECONDS), lasts, random.choice(plan.engines))

    asks, faults = [drawn(ask) for ask in plan.asks], [*plan.faults, *(fault() for _ in range(random.randrange(3)))]
    faults.sort(key=lambda each: each.at)
    return replace(plan, migrates=True, rebalances=random.random() < 0.5, asks=asks, faults=faults)


def with_chats(plan: Plan) -> Plan:
    """Return the plan with two tokenizers, of which most requests need one, and with grammars. The tokenizers, and the
    processes that render for them and that compile for engines, are killed and stopped, too."""
    random = Random(f"chats {plan.seed}")
    pair = replace(plan, num_tokenizers=2)

    def fault() -> Fault:
        kind = random.choice(("crash", "drain", "freeze", "helper_crash", "helper_crash", "helper_stop", "no_helper"))
        return Fault(kind, random.uniform(0.0, SECONDS), random.uniform(0.1, 4.0), random.choice(pair.tokenizers))

    def of_compilers() -> Fault:
        kind, lasts = random.choice(("compiler_crash", "compiler_crash", "no_compiler")), random.uniform(0.1, 4.0)
        return Fault(kind, random.uniform(0.0, SECONDS), lasts, random.choice(plan.engines))

    asks = [replace(ask, is_chat=random.random() < 0.8, has_grammar=random.random() < 0.5) for ask in plan.asks]
    faults = [*plan.faults, *(fault() for _ in range(random.randrange(2, 6)))]
    faults += [of_compilers() for _ in range(random.randrange(1, 5))]
    return replace(pair, asks=asks, faults=sorted(faults, key=lambda each: each.at))


def with_liars(plan: Plan) -> Plan:
    """Return the plan with one process or several that lie for a while, each of another kind: an engine, an output
    processor, one of two tokenizers, of which half of the requests need one, or the coordinator. Another part can do
    what each of the others does."""
    random = Random(f"liars {plan.seed}")
    pair = replace(plan, num_tokenizers=2)
    engines = [name for name, role in zip(plan.engines, plan.roles, strict=True) if plan.roles.count(role) > 1]
    liars = [random.choice(names) for names in (engines, plan.output_processors, pair.tokenizers, plan.coordinators)]
    chosen = random.sample(liars, random.choice((1, 1, 2, 4)))
    lies = [Fault("lie", random.uniform(0.0, SECONDS), random.uniform(0.5, 4.0), name) for name in chosen]
    asks = [replace(ask, is_chat=ask.is_chat or random.random() < 0.5) for ask in plan.asks]
    return replace(pair, asks=asks, faults=sorted([*plan.faults, *lies], key=lambda each: each.at))


def with_movers(plan: Plan) -> Plan:
    """Return the plan with two gateways or more, and clients that take a slow one for lost: they leave it and repeat
    their request elsewhere, again and again. Some gateways learn late that they were left, as busy ones do; some
    clients return when what was kept for them is about to be forgotten, or was."""
    random = Random(f"movers {plan.seed}")

    def moved(ask: Ask) -> Ask:
        patience, unnoticed = random.choice((0.05, 0.05, 0.1, 0.2, 0.5, 2.5)), random.choice((0.0, 0.0, 0.3, 3.0))
        away = random.choice((0.1, 0.1, 0.1, 1.0, random.uniform(14.5, 15.5), random.uniform(59.5, 60.5)))
        if ask.cancel_after is not None or random.random() < 0.3:
            return ask
        timeout = max(ask.timeout, 5.0 * away)
        moving = replace(ask, resumes=True, cut_after=None, patience=patience, unnoticed=unnoticed)
        return replace(moving, away=away, timeout=timeout)

    return replace(plan, num_gateways=max(plan.num_gateways, 2), asks=list(map(moved, plan.asks)))


def with_losses_together(plan: Plan) -> Plan:
    """Return the plan with copies of all requests, and clients that resume. Two parts of different kinds, or one of
    each kind as on a host that is lost, are killed in the same instant, and others once more when the first ones are
    back; nothing else goes wrong."""
    random = Random(f"together {plan.seed}")
    num = random.choice((2, 2, 3))
    mesh = replace(plan, num_gateways=2, num_output_processors=num, num_tokenizers=2, copies_journals=True, spares=True)

    def resumed(ask: Ask) -> Ask:
        tokens, hashed = with_rows(ask.prompt, ask.files)
        max_tokens = min(random.randrange(20, 60), _LONGEST - len(tokens))
        stop = _draw_stop(random, tokens, max_tokens, plan.state_chunk, hashed=hashed) if ask.stop else ()
        wanted = expected(tokens, max_tokens, stop, plan.state_chunk, hashed=hashed)
        longer = replace(ask, max_tokens=max_tokens, stop=stop, expected=wanted, gateway=random.randrange(2))
        has_key = random.random() < 0.3  # and repeats its request instead of resuming it
        return replace(
            longer,
            resumes=True,
            cut_after=None,
            patience=30.0 if has_key else None,
            away=Ask.away,
            is_chat=bool(ask.files) or ask.seed % 3 == 0,
        )

    def losses(at: float) -> list[Fault]:
        kinds = [mesh.gateways, mesh.output_processors, mesh.tokenizers, mesh.engines, mesh.coordinators]
        is_pair = random.random() < 0.3
        chosen = random.choice((kinds[:2], kinds[:4], kinds)) if not is_pair else random.sample(kinds, 2)
        return [Fault("crash", at, random.uniform(0.1, 1.0), random.choice(names)) for names in chosen]

    first = random.uniform(0.1, SECONDS)
    faults = [*losses(first), *losses(first + random.uniform(2.0, 3.0))]
    return replace(mesh, asks=list(map(resumed, plan.asks)), faults=faults, calls=[])


def with_stutters(plan: Plan) -> Plan:
    """Return the plan with clients that resume and whose connections end once, while every part is stopped and
    continued by itself, again and again, as on a machine with far too few processors. In half of the runs requests have
    copies, and a gateway, an output processor or the coordinator is killed in between; nothing else goes wrong."""
    random = Random(f"stutters {plan.seed}")
    is_killed = random.random() < 0.5
    mesh = replace(
        plan,
        num_gateways=2,
        num_tokenizers=2,
        step_seconds=random.choice((0.05, 0.2)),  # most answers run through several stops
        num_blocks=max(plan.num_blocks, 24),
        copies_journals=is_killed,
        stutters=True,
        spares=True,
        calls=[],
    )

    def patient(ask: Ask) -> Ask:
        tokens, hashed = with_rows(ask.prompt, ask.files)
        max_tokens = min(random.randrange(20, 60), _LONGEST - len(tokens))
        stop = _draw_stop(random, tokens, max_tokens, plan.state_chunk, hashed=hashed) if ask.stop else ()
        wanted = expected(tokens, max_tokens, stop, plan.state_chunk, hashed=hashed)
        longer = replace(ask, max_tokens=max_tokens, stop=stop, expected=wanted, gateway=random.randrange(2))
        at, cut_after = random.uniform(0.0, _STUTTER_SECONDS), random.choice((None, random.uniform(0.1, 4.0)))
        return replace(
            longer,
            at=at,
            cut_after=cut_after,
            resumes=True,
            patience=None,
            cancel_after=None,
            away=Ask.away,
            timeout=90.0,
        )

    faults: list[Fault] = []
    victim = random.choice((*mesh.gateways, *mesh.output_processors, *mesh.coordinators)) if is_killed else ""
    for name in (*mesh.gateways, *mesh.output_processors, *mesh.engines, *mesh.coordinators, *mesh.tokenizers):
        at, killed_at = random.uniform(0.0, 1.0), random.uniform(0.3, 0.7) * _STUTTER_SECONDS
        while at < _STUTTER_SECONDS:
            is_crash = name == victim and at >= killed_at
            victim = "" if is_crash else victim
            lasts = random.uniform(0.1, 1.0) if is_crash else random.uniform(1.0, 6.0)
            faults.append(Fault("crash" if is_crash else "freeze", at, lasts, name))
            at += lasts + random.uniform(0.2, 1.0)
    asks = sorted(map(patient, 3 * plan.asks), key=lambda ask: ask.at)
    return replace(mesh, asks=asks, faults=sorted(faults, key=lambda fault: fault.at))


def with_lying_owner(plan: Plan) -> Plan:
    """Return the plan with two engines that prefill and two that decode, of which one lies all the time whose KV others
    read. No other fault happens."""
    return replace(plan, roles=ROLES[-1], faults=[Fault("lie", 0.0, 2 * SECONDS, "engine-0")])


def with_images(plan: Plan) -> Plan:
    """Return the plan with two encoders, and images in most prompts, of which many have the same tokens up to their
    image's end. The encoders are killed, stopped and cut off; some engines have hardly room for one image's rows."""
    random = Random(f"images {plan.seed}")
    files = [file_of(number, num_rows) for number in range(3) for num_rows in (6, 12)]
    beginning = list(_draw_ids(random, 10))
    rows_bytes = random.choice((1 << 20, 12 * 4 * HIDDEN_SIZE, 20 * 4 * HIDDEN_SIZE))
    if plan.state_chunk > 1:
        rows_bytes = 1 << 20  # rows that come one image at a time end chunks where they stand
    pair = replace(plan, num_encoders=2, num_tokenizers=2, rows_bytes=rows_bytes)

    def drawn(ask: Ask) -> Ask:
        shown = tuple(random.choice(files) for _ in range(random.choice((0, 1, 1, 2, 3))))
        prompt = list(ask.prompt[-30:])
        places = [0, *(random.randrange(len(prompt) + 1) for _ in shown[1:])][: len(shown)]
        for place in sorted(places, reverse=True):
            prompt.insert(place, MARK)
        if random.random() < 0.7:
            prompt = beginning + prompt
        tokens, hashed = with_rows(tuple(prompt), shown)
        stop = _draw_stop(random, tokens, ask.max_tokens, plan.state_chunk, hashed=hashed) if ask.stop else ()
        wanted = expected(tokens, ask.max_tokens, stop, plan.state_chunk, hashed=hashed)
        return replace(ask, prompt=tuple(prompt), files=shown, is_chat=True, stop=stop, expected=wanted)

    def fault() -> Fault:
        kind = random.choice(("crash", "crash", "drain", "freeze", "cut", "one_way_cut", "reset"))
        at, lasts, encoder = random.uniform(0.0, SECONDS), random.uniform(0.1, 4.0), random.choice(pair.encoders)
        if kind not in LINK_FAULTS:
            return Fault(kind, at, lasts, encoder)
        ends = [encoder, random.choice((*pair.gateways, *pair.engines))]
        random.shuffle(ends)
        return Fault(kind, at, lasts, *ends)

    faults = [*plan.faults, *(fault() for _ in range(random.randrange(2, 6)))]
    asks = [drawn(ask) for ask in plan.asks]
    return replace(pair, asks=asks, faults=sorted(faults, key=lambda each: each.at))


def _draw_ids(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.choice(_PROMPT_IDS) for _ in range(count))


def _draw_ask(random: Random, prefixes: Sequence[tuple[int, ...]], lengths: tuple[int, int], num_gateways: int) -> Ask:
    at = random.uniform(0.0, SECONDS)
    prefix = random.choice(prefixes) if random.random() < 0.3 else ()
    prompt = prefix + _draw_ids(random, random.randrange(*lengths))
    max_tokens = random.randrange(1, 24)
    stop = _draw_stop(random, prompt, max_tokens) if random.random() < 0.25 else ()
    ask = Ask(
        at=at,
        prompt=prompt,
        max_tokens=max_tokens,
        expected=expected(prompt, max_tokens, stop),
        num_samples=2 if random.random() < 0.15 else 1,
        timeout=1.0 if random.random() < 0.1 else 20.0,
        cancel_after=random.uniform(0.0, 0.6) if random.random() < 0.1 else None,
        stop=stop,
        seed=random.getrandbits(32),
        gateway=random.randrange(num_gateways),
        resumes=random.random() < 0.5,
    )
    of_connection = Random(ask.seed)  # so that the other draws do not depend on it
    is_cut = ask.resumes and ask.cancel_after is None and of_connection.random() < 0.5
    return replace(ask, cut_after=of_connection.uniform(0.0, 0.6)) if is_cut else ask


def _draw_stop(
    random: Random, prompt: tuple[int, ...], max_tokens: int, state_chunk: int = 0, hashed: tuple[int, ...] = ()
) -> tuple[str, ...]:
    """Return a stop string that the output contains, if it is long enough."""
    text = expected(prompt, max_tokens, (), state_chunk, hashed).text
    start = random.randrange(len(text) + 1)
    stop = text[start : start + random.randrange(1, 6)]
    return (stop,) if stop.strip("\ufffd") == stop and stop else ()


def _draw_fault(random: Random, plan: Plan, kinds: Sequence[str]) -> Fault:
    kind = random.choice(kinds)
    at = random.uniform(0.0, SECONDS)
    is_long = random.random() < (0.6 if kind == "hang" else 0.25)
    longest = (4.0, 4.7) if kind == "hang" else (3.0, 9.0)  # a hang ends soon after it was noticed
    lasts = random.uniform(*longest) if is_long else random.uniform(0.1, 1.5)
    if kind in LINK_FAULTS:
        target, other = random.choice(_links(plan))
        if random.random() < 0.5:
            target, other = other, target
        return Fault(kind, at, lasts, target, other)
    if kind in CORE_FAULTS:
        return Fault(kind, at, lasts, random.choice(plan.engines))
    service = random.choice(("coordinator", "output_processor", "output_processor", "engine", "engine", "gateway"))
    parts = {"gateway": plan.gateways, "output_processor": plan.output_processors, "engine": plan.engines}
    return Fault(kind, at, lasts, random.choice(parts.get(service, ["coordinator-0"])))


def _links(plan: Plan) -> list[tuple[str, str]]:
    processors, engines = plan.output_processors, plan.engines
    links = [(gateway, name) for gateway in plan.gateways for name in ("coordinator-0", *processors, *processors)]
    links += [(name, engine) for name in processors for engine in engines]
    links += [(name, "coordinator-0") for name in (*processors, *engines)]
    if plan.is_split:
        links += [(one, other) for one in engines for other in engines if one != other]
    return links
