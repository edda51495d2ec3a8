"""Requests that move from core to core while they generate, with a front in memory that asks for it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.kv_pair import Engine, Pair, PairRequest
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer, KVRelease, KVVerdict, KVVerify
from tokenloom.engine_core.data.messages import AcceptTokens, EngineCoreOutput, FinishReason
from tokenloom.engine_core.kv_transfer.leases import prompt_digest


@dataclass
class Leg(PairRequest):
    """One attempt: what of it the pair's front knows. ``prefill`` has the KV that it loads, ``decode`` runs it."""

    num_given: int = 0

    @property
    def decode_name(self) -> str:
        return self.name


@dataclass
class Moving:
    """A request that has moved as often as it has legs but one."""

    name: str
    prompt: list[int]
    params: CoreSamplingParams
    salt: bytes
    legs: list[Leg] = field(default_factory=list)
    target: Leg | None = None
    """The leg that waits to go on, if it moves."""
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    num_moves: int = 0
    num_kept: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def leg(self) -> Leg:
        return self.legs[-1]

    @property
    def is_done(self) -> bool:
        return self.reason is not None


class MovingPair(Pair):
    """Engines between which the test moves requests."""

    def __init__(self, num_engines: int = 2, **settings: Any) -> None:
        super().__init__(num_engines, **settings)
        self.moving: dict[str, Moving] = {}
        self._wanted: dict[str, Engine] = {}
        self._numbers = itertools.count(1)

    def begin(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 40,
        *,
        at: int = 0,
        salt: bytes = b"",
        params: CoreSamplingParams | None = None,
    ) -> Moving:
        params = params or CoreSamplingParams(max_tokens=max_tokens, seed=0)
        moving = Moving(name, list(prompt), params, salt)
        self.moving[name] = moving
        self._add(moving, self.engines[at], None)
        return moving

    def move(self, moving: Moving, to: int) -> bool:
        """Asks the engine that runs it; whether it agrees."""
        leg = moving.leg
        lease_id = f"{leg.name}-lease".encode()
        refusal = leg.decode.core.scheduler.lend_request(leg.name, lease_id, leg.num_given)
        moving.refusals += [refusal] if refusal else []
        if not refusal:
            leg.salt = moving.salt
            self._wanted[leg.name] = self.engines[to]
        return not refusal

    def call_off(self, moving: Moving) -> None:
        """As an output processor that finds no engine: the one that runs it is told, the other one forgets it."""
        moving.leg.decode.core.scheduler.keep_request(moving.leg.name)
        self._drop_target(moving)

    def settle(self, max_turns: int = 5000) -> None:
        super().settle(max_turns)
        assert all(each.is_done for each in self.moving.values()), self.moving
        for engine in self.engines:
            check_idle(engine.core.scheduler)

    def kill(self, index: int, replacement: Engine) -> None:
        """Puts a new engine in the place of one; what ran there is replayed by ids at the next one."""
        lost = self.engines[index]
        self.engines[index] = replacement
        for moving in self.moving.values():
            if moving.target is not None and moving.target.decode is lost:
                self.call_off(moving)
            if not moving.is_done and moving.leg.decode is lost:
                self._drop_target(moving)
                self._add(moving, self.engines[1 - index], None)

    def step(self, engine: Engine) -> bool:
        if not engine.core.has_work():
            return False
        for output in engine.core.step().outputs:
            name, _, number = output.request_id.partition("/")
            moving = self.moving[name]
            if not moving.is_done and output.request_id == moving.leg.name:
                self._took(moving, moving.leg, output)
            else:
                assert not output.new_token_ids, f"{number} of {name} has tokens that are another's"
        return True

    def _took(self, moving: Moving, leg: Leg, output: EngineCoreOutput) -> None:
        if output.kv_granted_tokens:
            self._add(moving, self._wanted.pop(leg.name), leg, num_tokens=output.kv_granted_tokens)
        if output.is_kept:
            moving.num_kept += 1
            self._drop_target(moving)
        if output.new_token_ids:
            assert output.token_index == len(moving.tokens), "a token is missing or double"
            moving.tokens += output.new_token_ids
        if output.finish_reason is FinishReason.PREFILLED:
            target, moving.target = moving.target, None
            moving.num_moves += 1
            if target is None:  # it was called off too late
                self._add(moving, self.engines[0], None)
                leg.decode.core.abort_requests([leg.name])
                return
            moving.legs.append(target)
            rest = moving.tokens[target.num_given - len(moving.prompt) :]
            target.num_given += len(rest)
            target.decode.core.scheduler.accept_tokens(AcceptTokens(target.name, rest))
        elif output.finish_reason is not None:
            moving.reason = output.finish_reason
            self._drop_target(moving)

    def _drop_target(self, moving: Moving) -> None:
        target, moving.target = moving.target, None
        if target is not None:
            target.is_aborted = True
            target.decode.core.abort_requests([target.name])

    def _add(self, moving: Moving, engine: Engine, source: Leg | None, num_tokens: int = 0) -> None:
        """Adds a leg. ``source``: the one whose KV it loads, of ``num_tokens`` tokens, more than are known."""
        number = next(self._numbers)
        known = moving.tokens if source is None else moving.tokens[:-1]
        if source is not None:
            known = moving.tokens[: max(source.num_given - len(moving.prompt), len(moving.tokens) - 1)]
        name, owner = f"{moving.name}/{number}", engine if source is None else source.decode
        leg = Leg(name, moving.prompt, moving.params.max_tokens, owner, engine, is_early=True, salt=moving.salt)
        leg.num_given = len(moving.prompt) + len(known)
        self.requests[name] = leg
        leg.finish_reason = FinishReason.LENGTH  # the pair waits for others
        message = make_request(name, moving.prompt, accepted=known, salt=moving.salt)
        message.sampling_params = moving.params
        if source is None:
            moving.legs.append(leg)
            engine.core.add_request(message)
            return
        moving.target = leg
        self._acquired(moving, leg, source)
        message.remote_kv, message.awaits_tokens = leg.target, True
        if leg.target is not None:
            assert leg.target.num_tokens == num_tokens
        engine.core.add_request(message)
        if leg.target is not None:
            self._follow(leg, leg.target, 0)

    def _acquired(self, moving: Moving, leg: Leg, source: Leg) -> None:
        digest = prompt_digest([*moving.prompt, *moving.tokens][: source.num_given], moving.salt)
        answers: list[KVAnswer] = []
        self._call(
            leg.prefill,
            lambda number: KVAcquire(
                number, f"{source.name}-lease".encode(), leg.decode.core.ready.kv_layout, digest, ["memory"]
            ),
            answers.append,
        )
        self.pump(leg.prefill)
        leg.target = answers[0].target

    def _verify(self, event: KVVerify) -> None:
        leg = self.requests[event.request_id]
        leg.num_verifies += 1
        target = leg.target
        assert target is not None

        def released(answer: KVAnswer) -> None:
            self._tell(leg, KVVerdict(event.request_id, answer.valid, answer.failure, answer.checksums))

        self._call(leg.prefill, lambda number: KVRelease(number, target.acquisition_id, target.generations), released)
