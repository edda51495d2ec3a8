"""Where the prompt of a turn differs from the turn before it, and why: a byte is a token, and 0 ends an answer."""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tokenloom.request.packed_ids import pack
from tokenloom.request.prefix_schedule import prefix_hashes
from tokenloom.services.gateway.formats.tool_request import Tool
from tokenloom.services.gateway.generation.open_turn import UNNAMED, OpenTurn, TurnComparer, TurnNames, cause_between
from tokenloom.services.gateway.generation.past_turns import PastTurns
from tokenloom.services.gateway.openai.chat import read_chat
from tokenloom.v1 import inference_pb2, output_processor_pb2, tokenizer_pb2, types_pb2

BLOCK = 4
SYSTEM = {"role": "system", "content": "Be brief, and name the files that you change."}
TASK = {"role": "user", "content": "Make a file."}
MORE = {"role": "user", "content": "Go on."}


def cause(name: str) -> int:
    return inference_pb2.MissCause.Value(f"MISS_CAUSE_{name.upper()}")


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def write(message: Mapping[str, Any], *, keeps_reasoning: bool = True) -> str:
    thought = message.get("reasoning_content", "") if keeps_reasoning else ""
    calls = "".join(json.dumps(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return f"<{message['role']}>" + (f"<think>{thought}</think>" if thought else "") + message["content"] + calls + "\0"


class Conversation:
    """One tenant's turns, as a gateway compares them."""

    def __init__(self, *, replays_ids: bool = False) -> None:
        self.past = PastTurns(lambda: 0.0)
        self.comparer = TurnComparer(self.past, replays_ids=replays_ids)
        self.num_decoded = self.most_decoded = 0

    async def ask(
        self,
        *messages: Mapping[str, Any],
        text: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        tenant: str = "one",
        keeps_reasoning: bool = True,
        tokens: Sequence[int] | None = None,
        named: TurnNames = UNNAMED,
        **chat: Any,
    ) -> OpenTurn:
        """A turn's prompt. ``text``: what the template writes."""
        rendered = text or "".join(write(each, keeps_reasoning=keeps_reasoning) for each in messages) + "<assistant>"
        ids = list(tokens or rendered.encode())
        is_packed = len(messages) > 3
        prompt = tokenizer_pb2.TokenizedPrompt(
            token_ids=[] if is_packed else ids,
            packed_token_ids=pack(ids) if is_packed else b"",
            block_hash_prefixes=prefix_hashes(ids, BLOCK, salt + adapter),
        )
        keys, read = (salt + adapter, adapter), read_chat(messages, **chat)
        turn = await self.comparer.open(read, prompt, tenant, keys, BLOCK, (0,), self.decode, named)
        assert (prompt.packed_token_ids if is_packed else array("I", prompt.token_ids).tobytes()) == turn.tokens
        return turn

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens above 255 are the texts of two."""
        self.num_decoded += 1
        self.most_decoded = max(self.most_decoded, len(token_ids))
        return b"".join(PAIRS.get(token) or bytes([token]) for token in token_ids).decode()

    def answered(
        self,
        turn: OpenTurn,
        answer: str | Sequence[int],
        *,
        num_reasoning: int = 0,
        name: str = "a",
        tenant: str = "one",
    ) -> None:
        ids = array("I", list(answer.encode()) if isinstance(answer, str) else answer)
        self.past.put(tenant, turn.ended(name, ids, finished(0, "e1"), num_reasoning), turn.replaced)


PAIRS = {300: b"ma", 301: b"de"}


def finished(cached: int, engine: str = "e1") -> output_processor_pb2.RequestFinished:
    timeline = types_pb2.Timeline(prefill_engine=engine, decode_engine=engine)
    return output_processor_pb2.RequestFinished(cached_tokens=cached, timeline=timeline)


async def begun(answer: str | Sequence[int] = "I made it.\0", **more: Any) -> Conversation:
    talk = Conversation(replays_ids=more.pop("replays_ids", False))
    num_reasoning = more.pop("num_reasoning", 0)
    talk.answered(await talk.ask(SYSTEM, TASK, **more), answer, num_reasoning=num_reasoning)
    return talk


async def test_a_prompt_that_continues_the_turn_misses_nothing() -> None:
    talk = await begun()
    turn = await talk.ask(SYSTEM, TASK, said("I made it."), MORE)
    whole = turn.before.num_tokens if turn.before else 0
    assert (turn.cause, turn.common, turn.num_reusable) == (0, whole, (whole - 1) // BLOCK * BLOCK)
    assert turn.miss(finished(turn.num_reusable)) is None
    assert talk.num_decoded == 0


async def test_a_turn_keeps_nothing_of_the_tokenizers_message() -> None:
    talk = await begun()
    (turn,) = [turn for shelf in talk.past._shelves.values() for turn, _ in shelf.turns.values()]
    assert isinstance(turn.hashes, array)
    assert list(turn.hashes) == prefix_hashes(list(array("I", turn.tokens))[: turn.num_prompt], BLOCK, b"")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (TurnNames(), TurnNames(), "new_prefix"),
        (TurnNames(session="one"), TurnNames(session="two"), "new_prefix"),
        (TurnNames(session="one"), TurnNames(session="one"), "message_changed"),
        (TurnNames(), TurnNames(compared="a"), "message_changed"),
    ],
)
async def test_another_conversation_with_the_same_system_prompt_is_new(
    before: TurnNames, now: TurnNames, expected: str
) -> None:
    talk = await begun(named=before)
    turn = await talk.ask(SYSTEM, {"role": "user", "content": "Read all files."}, named=now)
    assert turn.common >= len(write(SYSTEM))
    miss = turn.difference(turn.num_reusable)
    assert miss is not None
    assert miss.cause == cause(expected)
    assert turn.miss(finished(turn.num_reusable)) == miss
    if expected == "new_prefix":
        assert (miss.token, miss.missed_tokens) == (turn.common, turn.num_tokens - turn.common)


async def test_what_is_in_no_cache_any_more_was_evicted_or_lies_elsewhere() -> None:
    talk = await begun()
    turn = await talk.ask(SYSTEM, TASK, said("I made it."), MORE)
    reusable = turn.num_reusable
    for engine, expected in (("e1", "evicted"), ("e2", "other_engine")):
        miss = turn.miss(finished(8, engine))
        assert miss == inference_pb2.CacheMiss(cause=cause(expected), token=8, missed_tokens=reusable - 8)  # type: ignore[arg-type]


async def test_the_coordinator_knows_turns_of_other_gateways() -> None:
    turn = await Conversation().ask(SYSTEM, TASK, said("I made it."), MORE)
    for moved, expected in ((False, "evicted"), (True, "other_engine")):
        end = finished(8)
        end.timeline.past_tokens, end.timeline.kv_elsewhere = 40, moved
        assert turn.miss(end) == inference_pb2.CacheMiss(cause=cause(expected), token=8, missed_tokens=32)  # type: ignore[arg-type]
    end.cached_tokens = 40
    miss = turn.miss(end)
    assert miss is not None
    assert miss.cause == cause("new_prefix")


async def test_the_first_turn_is_new_and_other_tenants_are_unknown() -> None:
    talk = await begun()
    for turn in (await talk.ask(TASK), await talk.ask(SYSTEM, TASK, said("I made it."), MORE, tenant="two")):
        assert (turn.cause, turn.before) == (cause("new_prefix"), None)
        miss = turn.miss(finished(4))
        assert miss is not None
        assert (miss.token, miss.missed_tokens) == (4, turn.num_tokens - 4)


@pytest.mark.parametrize(
    ("messages", "chat", "expected"),
    [
        ([{**SYSTEM, "content": "Be brief, and name nothing."}, TASK, said("I made it.")], {}, "message_changed"),
        ([SYSTEM, {**TASK, "content": "Make two."}, said("I made it.")], {}, "message_changed"),
        ([SYSTEM, said("Shorter."), MORE], {}, "message_changed"),
        ([SYSTEM, TASK, said("I did not."), MORE], {}, "message_changed"),
        ([SYSTEM, TASK, MORE], {}, "message_changed"),
        ([SYSTEM, TASK, said("I  made it."), MORE], {}, "blanks_changed"),
        ([SYSTEM, TASK, said("I made it."), MORE], {"tools": [Tool("f", {}, {"type": "function"})]}, "tools_changed"),
        ([SYSTEM, TASK, said("I made it."), MORE], {"template_kwargs": {"x": 1}}, "template_changed"),
    ],
)
async def test_what_the_client_changed(messages: list[Any], chat: dict[str, Any], expected: str) -> None:
    talk = await begun()
    text = None
    if chat:  # the template writes them first; the first blocks are the same all the same
        text = write(SYSTEM) + "".join(chat) + "".join(map(write, messages[1:]))
    turn = await talk.ask(*messages, text=text, **chat)
    assert turn.cause == cause(expected), inference_pb2.MissCause.Name(turn.cause)
    miss = turn.miss(finished(turn.num_reusable))
    assert miss is not None
    assert miss.token == turn.common


async def test_a_line_that_the_client_changes_is_named() -> None:
    talk = Conversation()
    system = "x-anthropic-billing-header: cch={};\nRules of the house.\nBe brief."
    talk.answered(await talk.ask({"role": "system", "content": system.format(1)}, TASK), "I made it.\0")
    turn = await talk.ask({"role": "system", "content": system.format(2)}, TASK, said("I made it."), MORE)
    assert turn.cause == cause("volatile_line")


THOUGHT = "A file is easy."


@pytest.mark.parametrize("sends", [True, False])
async def test_reasoning_that_is_dropped_from_the_answer(sends: bool) -> None:
    talk = await begun(f"<think>{THOUGHT}</think>I made it.\0", num_reasoning=len(THOUGHT))
    message = said("I made it.", reasoning_content=THOUGHT) if sends else said("I made it.")
    turn = await talk.ask(SYSTEM, TASK, message, MORE, keeps_reasoning=False)
    assert turn.cause == cause("reasoning_dropped")
    if sends:
        kept = await talk.ask(SYSTEM, TASK, message, MORE)
        assert kept.cause == 0


async def test_reasoning_that_a_later_turn_drops_from_the_history() -> None:
    talk = await begun(f"<think>{THOUGHT}</think>I made it.\0", num_reasoning=len(THOUGHT))
    message = said("I made it.", reasoning_content=THOUGHT)
    talk.answered(await talk.ask(SYSTEM, TASK, message, MORE), "Done.\0", name="b")
    by_template = await talk.ask(SYSTEM, TASK, message, MORE, said("Done."), MORE, keeps_reasoning=False)
    by_client = await talk.ask(SYSTEM, TASK, said("I made it."), MORE, said("Done."), MORE)
    assert by_template.cause == by_client.cause == cause("reasoning_dropped")


CALL = 'I call.{"command": "echo \\u00e9 a/b", "n": 1}'


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ('I call.{"command":"echo \\u00e9 a/b","n":1}', "arguments_reserialised"),
        ('I call.{"command": "echo é a\\/b", "n": 1}', "arguments_reserialised"),
        ('I call.{"n": 1, "command": "echo \\u00e9 a/b"}', "arguments_reserialised"),
        ('I call.{"command": "echo other", "n": 1}', "message_changed"),
        ('I  call.{"command": "echo \\u00e9 a/b", "n": 1}', "blanks_changed"),
        (CALL, "retokenised"),
    ],
)
def test_why_the_text_of_an_answer_differs(now: str, expected: str) -> None:
    assert cause_between(CALL, now, reasons=False) == cause(expected)


GENERATED = [*b"I ", 300, 301, *b" it.", 0]
"""The same text in other tokens."""


async def test_an_answer_in_other_tokens_is_named_and_stays_a_fresh_tokenization() -> None:
    talk = await begun(GENERATED)
    turn = await talk.ask(SYSTEM, TASK, said("I made it."), MORE)
    assert turn.cause == cause("retokenised")
    assert turn.before is not None
    assert turn.common == turn.before.num_prompt + 2
    fresh = "".join(map(write, (SYSTEM, TASK, said("I made it."), MORE))) + "<assistant>"
    assert turn.tokens == array("I", list(fresh.encode())).tobytes()


async def test_replayed_ids_stand_in_every_later_prompt() -> None:
    talk = await begun(GENERATED, replays_ids=True)
    messages: list[Any] = [SYSTEM, TASK, said("I made it."), MORE]
    first = await talk.ask(*messages)
    assert (first.cause, [span.start for span in first.spans]) == (0, [len(write(SYSTEM) + write(TASK)) + 11])
    assert first.before is not None
    assert first.tokens.startswith(first.before.tokens)
    talk.answered(first, GENERATED, name="b")
    talk.num_decoded = 0
    second = await talk.ask(*messages, said("I made it."), MORE)
    assert second.before is not None
    assert (second.cause, len(second.spans)) == (0, 2)
    assert second.tokens.startswith(second.before.tokens)
    assert talk.num_decoded == 2, "only the new answer is read: the tokens of the first one are known"
    talk.answered(second, "Done.\0", name="c")
    branch = await talk.ask(*messages, said("I did not."), MORE)
    assert (branch.cause, len(branch.spans)) == (cause("message_changed"), 1)


async def test_of_an_answer_that_has_become_much_longer_a_part_is_compared() -> None:
    talk = await begun('{"a": 1}\0')
    turn = await talk.ask(SYSTEM, TASK, said('{"a": 2' + "x" * 100_000 + "}"), MORE)
    assert (turn.cause, talk.most_decoded < 2000) == (cause("message_changed"), True)


async def test_what_says_something_else_is_not_replayed() -> None:
    talk = await begun(GENERATED, replays_ids=True)
    turn = await talk.ask(SYSTEM, TASK, said("I made two."), MORE)
    assert (turn.cause, turn.spans) == (cause("message_changed"), [])


async def test_an_answer_that_a_limit_ended_is_replayed_with_the_end_of_the_template() -> None:
    talk = await begun(GENERATED[:-1], replays_ids=True)
    turn = await talk.ask(SYSTEM, TASK, said("I made it."), MORE)
    assert turn.before is not None
    rest = turn.tokens[len(turn.before.tokens) :]
    assert rest == array("I", list(f"\0{write(MORE)}<assistant>".encode())).tobytes()


async def test_another_salt_or_adapter() -> None:
    talk = Conversation()
    long = {"role": "system", "content": "x" * 80}
    talk.answered(await talk.ask(long, TASK), "I made it.\0")
    for keys, expected in (({"salt": b"s"}, "salt_changed"), ({"adapter": b"a"}, "adapter_changed")):
        turn = await talk.ask(long, TASK, said("I made it."), MORE, **keys)  # type: ignore[arg-type]
        assert (turn.cause, turn.num_reusable) == (cause(expected), 0)
        miss = turn.miss(finished(0))
        assert miss is not None
        assert turn.before is not None
        assert (miss.token, miss.missed_tokens) == (0, turn.before.num_tokens)


async def test_a_branch_finds_what_it_shares() -> None:
    talk = await begun()
    talk.answered(await talk.ask(SYSTEM, TASK, said("I made it."), MORE), "More.\0", name="b")
    assert len(talk.past) == 1, "the second turn replaces the first one"
    again = await talk.ask(SYSTEM, TASK)
    assert (again.cause, again.common) == (0, again.num_tokens)
    branch = await talk.ask(SYSTEM, TASK, said("I made it."), TASK)
    assert branch.cause == cause("message_changed")
    assert branch.common > len(write(SYSTEM) + write(TASK))
