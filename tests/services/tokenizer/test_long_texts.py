"""Texts that are encoded by chunks have the ids that they have as a whole, and chunks of others are never found."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.request.packed_ids import LONG_PROMPT, ids_of, num_ids, pack
from tokenloom.services.tokenizer import encode_worker, encoder, long_texts
from tokenloom.services.tokenizer.encode_worker import CutTrials, EncodeJob, EncodeReply, answer
from tokenloom.services.tokenizer.encoder import CHUNK_CHARS, CUT_KINDS, SafeCuts, TextEncoder
from tokenloom.services.tokenizer.long_texts import ChunkCache, EncodeProcesses, LongTexts, RunInThread
from tokenloom.services.tokenizer.tokenizer_servicer import TokenizerMetrics
from tokenloom.v1.tokenizer_pb2 import EncodeRequest, EncodeResponse, TokenizedPrompt
from tokenloom.v1.types_pb2 import REASONING_START_OPEN

TOKENIZER = load_tokenizer(DEMO_MODEL)
CORPUS = ["the cat saw \n the dog \n and so on", "it was 10\n or 20 then", "if x:\n    y = 2\n\n\nz \n\n a"] * 20
LINES = "".join(f"Line {number} tells of the river and the mill.\n" for number in range(1200))
REST = TokenizedPrompt(reasoning_start=REASONING_START_OPEN)
MINE, OTHERS = ("tenant", b"salt"), ("another", b"salt")


def byte_level(*, use_regex: bool = True, prefix_space: bool = False) -> Tokenizer:
    """GPT-2's pattern, or none, with tokens of several blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama() -> Tokenizer:
    """A blank stands before each text."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁▁"]
    model = models.BPE(dict(zip(words, range(999), strict=False)), [("▁", "t"), ("▁", "▁")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([token])
    return tokenizer


def framed() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


def cut_short() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(100)
    return tokenizer


def kinds(tokenizer: Tokenizer, num_texts: int = 2000) -> list[str]:
    cuts = CutTrials(tokenizer).find(num_texts)
    return [] if cuts is None else [kind.name for kind in cuts.kinds]


def test_no_text_of_ten_thousand_differs_with_the_demo_model() -> None:
    assert kinds(TOKENIZER, 10_000) == ["line", "word"]


@given(text=st.text(st.sampled_from("ab \n_é"), max_size=300), start=st.integers(0, 40), chars=st.integers(1, 9))
def test_a_text_that_is_searched_by_parts_is_cut_at_the_same_places(text: str, start: int, chars: int) -> None:
    cuts = SafeCuts(CUT_KINDS, b"", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "SEARCHED_CHARS", chars)
        patch.setattr(encoder, "PAUSE_SECONDS", 0)
        match = cuts._find(text, start)
        assert cuts._next_cut(text, start) == (None if match is None else match.end())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (byte_level, ["word"]),  # a blank and the end of a line are one token only where a text ends
        (lambda: byte_level(prefix_space=True), ["word"]),
        (framed, ["word"]),
        (llama, []),
        (cut_short, []),
        (lambda: byte_level(use_regex=False), []),  # it has learnt tokens of several words
        (lambda: with_token(AddedToken("<i am>")), []),
        (lambda: with_token(AddedToken("END", rstrip=True)), []),
        (lambda: with_token(AddedToken("<END>", rstrip=True, lstrip=True)), ["word"]),
    ],
)
def test_each_tokenizer_is_cut_only_where_it_may_be(make: Callable[[], Tokenizer], expected: list[str]) -> None:
    assert kinds(make()) == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [(AddedToken("END", rstrip=True), ["line"]), (AddedToken("SEP", lstrip=True), ["word"])],
)
def test_a_token_that_takes_blanks_is_tried_among_thousands(token: AddedToken, expected: list[str]) -> None:
    words = [f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in range(9000)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\s*\n|[^\sA-Za-z]|\s"), "isolated")
    assert kinds(tokenizer, 200) == ["line", "word"]
    tokenizer.add_tokens([token])
    assert kinds(tokenizer, 200) == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [("Q▁", ["line"]), ("Q▁▁", ["line"]), ("\nж", ["word"]), ("Ċ\u00d7", ["word"])],
)
def test_one_token_across_a_cut_is_enough(token: str, expected: list[str]) -> None:
    trials = CutTrials(TOKENIZER)
    trials._vocabulary.append(token)
    found = trials.find(200)
    assert found is not None
    assert [kind.name for kind in found.kinds] == expected


def test_a_text_is_searched_only_where_a_blank_is() -> None:
    cuts, searched = SafeCuts(CUT_KINDS, b"", b""), list[int]()
    find = cuts._find

    def note(text: str, start: int, end: int) -> object:
        searched.append(end - start)
        return find(text, start, end)

    cuts._find = note  # type: ignore[assignment]
    assert cuts.chunks("a" * 500_000) == ["a" * 500_000]
    assert not searched
    assert len(cuts.chunks("a" * 500_000 + " b")) == 2
    assert sum(searched) < 2 * encoder.SEARCHED_CHARS


PIECES = st.sampled_from(["\n", " ", "a", "The river", "I'm", "10", "é", "日本", "<|im_end|>", " \n", "x_y", ".", "\t"])


@given(st.lists(PIECES, max_size=60).map("".join))
def test_ids_are_those_of_the_whole(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "CHUNK_CHARS", 4)
        chunks = SafeCuts(CUT_KINDS, b"", b"").chunks(text)
    assert "".join(chunks) == text
    whole, *parts = TOKENIZER.encode_batch_fast([text, *chunks], add_special_tokens=False)
    assert [token_id for part in parts for token_id in part.ids] == whole.ids


def test_a_text_that_goes_on_has_the_same_chunks() -> None:
    cuts = SafeCuts(CUT_KINDS, b"", b"")
    before, after = cuts.chunks(LINES), cuts.chunks(LINES + "And then it ended.\n" * 300)
    assert before[:-1] == after[: len(before) - 1]
    assert all(CHUNK_CHARS <= len(chunk) < 2 * CHUNK_CHARS for chunk in after[:-1])


class TestCache:
    def test_chunks_are_found_by_those_who_have_sent_them(self) -> None:
        cache = ChunkCache(100_000)
        cache.put(MINE, "one", pack([1]))
        assert cache.find(MINE, ["one", "two"]) == [pack([1]), None]
        assert cache.find(OTHERS, ["one"]) == cache.find((MINE[0], b""), ["one"]) == [None]

    def test_the_room_is_kept_to_and_what_was_used_stays(self) -> None:
        cache = ChunkCache(16_000)
        for number in range(1000):
            cache.put(MINE, f"chunk {number}", pack([number]))
            assert cache.find(MINE, ["chunk 0"]) == [pack([0])]
            assert cache.num_bytes <= 16_000
        assert cache.find(MINE, ["chunk 1", "chunk 999"]) == [None, pack([999])]

    def test_one_tenant_does_not_drive_out_another(self) -> None:
        cache = ChunkCache(16_000)
        cache.put(OTHERS, "kept", pack([1]))
        for number in range(1000):
            cache.put(MINE, f"chunk {number}", pack([number]))
        assert cache.find(OTHERS, ["kept"]) == [pack([1])]

    def test_a_tenant_with_many_salts_does_not_drive_out_another(self) -> None:
        cache = ChunkCache(16_000)
        cache.put(OTHERS, "kept", pack([1]))
        for number in range(1000):
            cache.put((MINE[0], b"%d" % number), "chunk", pack([number]))
        assert cache.find(OTHERS, ["kept"]) == [pack([1])]

    def test_many_tenants_share_the_room(self) -> None:
        cache = ChunkCache(16_000)
        for number in range(1000):
            cache.put((f"{number}", b""), "chunk", pack([number]))
        assert cache.num_bytes <= 16_000
        assert cache.find(("0", b""), ["chunk"]) == [None]
        assert cache.find(("999", b""), ["chunk"]) == [pack([999])]

    def test_a_large_chunk_is_not_kept(self) -> None:
        cache = ChunkCache(16_000)
        cache.put(MINE, "a" * 1000, b"")
        assert (cache.find(MINE, ["a" * 1000]), cache.num_bytes) == ([None], 0)


@dataclass
class FakeProcesses:
    """Answers as a process would."""

    encoder: TextEncoder
    num_texts: list[int] = field(default_factory=list)

    async def run(self, job: EncodeJob, in_thread: RunInThread) -> EncodeReply:
        self.num_texts.append(len(job.chunks))
        reply: EncodeReply = await in_thread(answer, self.encoder, job)
        return reply


class Texts:
    """Long texts of one tokenizer, whose cuts are known."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER, max_bytes: int = 1 << 20) -> None:
        self.encoder = TextEncoder(tokenizer, block_size=16, max_text_bytes=200_000)
        self.processes = FakeProcesses(self.encoder)
        self.metrics = TokenizerMetrics(CollectorRegistry())
        counter = self.metrics.cached_tokens
        self.texts = LongTexts(self.encoder, self.processes, counter, max_bytes)  # type: ignore[arg-type]
        self.texts.cuts = CutTrials(tokenizer).find(200)

    @property
    def num_cached(self) -> int:
        return self.metrics.cached_tokens.value

    async def encode(
        self, text: str, tenant: str = "tenant", *, is_packed: bool = True, special: bool = False
    ) -> TokenizedPrompt:
        """Compare the prompt with that of the whole text, and return it."""
        request = EncodeRequest(
            texts=[text],
            want_hashes=True,
            cache_salt=b"salt",
            tenant=tenant,
            takes_packed_ids=is_packed,
            add_special_tokens=special,
        )
        response = await self.texts.encode(text, request, asyncio.to_thread, REST, special=special)
        assert response is not None
        (prompt,) = EncodeResponse.FromString(response.data).prompts
        assert response.num_tokens == num_ids(prompt)
        whole = self.encoder.encode(request).prompts[0]
        whole.reasoning_start = REST.reasoning_start
        assert prompt == whole
        return prompt


async def test_the_next_turn_encodes_what_is_new() -> None:
    texts = Texts()
    first = await texts.encode(LINES[:40_000])
    assert (texts.num_cached, texts.processes.num_texts) == (0, [])
    await texts.encode(LINES[:40_000] + "What came next?\n")
    num_cached = texts.num_cached
    assert 0.9 * len(ids_of(first)) < num_cached < len(ids_of(first))
    await texts.encode(LINES[:40_000], "another tenant")
    assert texts.num_cached == num_cached


async def test_much_that_is_new_is_encoded_by_a_process() -> None:
    texts = Texts()
    assert len(LINES) < long_texts.SHORT_BYTES < len(2 * LINES)
    await texts.encode("1\n" + 2 * LINES)
    await texts.encode("1\n" + 2 * LINES)
    assert len(texts.processes.num_texts) == 1
    assert texts.num_cached > 2 * LONG_PROMPT


async def test_lists_and_special_tokens() -> None:
    texts = Texts(framed())
    for _ in range(2):
        prompt = await texts.encode(LINES, is_packed=False, special=True)
        assert (
            prompt.token_ids[0]
            == texts.encoder.encode(EncodeRequest(texts=[""], add_special_tokens=True)).prompts[0].token_ids[0]
        )
    await texts.encode(LINES, special=False)
    assert texts.num_cached > 0


async def test_a_text_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 200000 bytes"):
        await Texts().encode("a " * 100_001)


class CutTexts:
    """Long texts of which a process, here a function, finds where they may be cut.

    Attributes:
        failures: Raised by the next trials.
        num_trials: How often it was tried.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_bytes: int = 1 << 20) -> None:
        monkeypatch.setattr(encode_worker, "NUM_TEXTS", 200)
        self.texts = Texts(max_bytes=max_bytes).texts
        self.texts.cuts = None
        self.failures: list[Exception] = []
        self.num_trials = 0
        processes = EncodeProcesses(None, 1)  # type: ignore[arg-type]
        processes._trials = lambda: self  # type: ignore[assignment,return-value]
        self.texts.processes = processes

    async def run(self, message: bytes) -> bytes:
        self.num_trials += 1
        if self.failures:
            raise self.failures.pop()
        return msgspec.msgpack.encode(answer(self.texts._encoder, msgspec.msgpack.decode(message, type=EncodeJob)))

    async def close(self) -> None:
        """Nothing was started."""

    async def is_cut(self, *, want_token_strings: bool = False) -> bool:
        """Return whether a text is encoded by chunks, and let what is tried end."""
        request = EncodeRequest(texts=[LINES], want_token_strings=want_token_strings)
        response = await self.texts.encode(LINES, request, asyncio.to_thread, REST)
        if (finding := self.texts.finding) is not None:
            await asyncio.wait([finding])
        return response is not None


async def test_texts_are_whole_until_the_cuts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = CutTexts(monkeypatch)
    assert not await texts.is_cut()
    assert await texts.is_cut()
    assert not await texts.is_cut(want_token_strings=True)
    assert texts.num_trials == 1
    without_room = CutTexts(monkeypatch, max_bytes=0)
    assert [await without_room.is_cut() for _ in range(2)] == [False, False]
    assert without_room.num_trials == 0


async def test_a_tokenizer_that_fails_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BaseException("a panic of the library")

    texts = CutTexts(monkeypatch)
    monkeypatch.setattr(CutTrials, "find", fail)
    assert [await texts.is_cut() for _ in range(3)] == [False, False, False]
    assert texts.num_trials == 1


async def test_a_process_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = CutTexts(monkeypatch)
    texts.failures = [Unavailable("the process does not start")]
    assert [await texts.is_cut() for _ in range(3)] == [False, False, True]
    assert texts.num_trials == 2


async def test_no_trial_waits_for_a_process_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(long_texts, "start_helper", start)
    processes = EncodeProcesses(encode_worker.EncodeSetup("", b"", 16, 0, 0), 1)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(processes.find_cuts(), 10)


async def test_trials_end_with_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = CutTexts(monkeypatch)
    never = asyncio.Event()
    monkeypatch.setattr(texts, "run", lambda _: never.wait())
    request = EncodeRequest(texts=[LINES])
    assert await texts.texts.encode(LINES, request, asyncio.to_thread, REST) is None
    await asyncio.wait_for(texts.texts.close(), 30)
    assert texts.texts.finding is not None
    assert texts.texts.finding.cancelled()
