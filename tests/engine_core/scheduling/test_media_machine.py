"""Runs an engine core at random with images whose rows come late, in pieces, or never: tokens follow from the rows."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import MultipleResults, initialize, multiple, precondition, rule

from tests.engine_core.helpers import make_request
from tests.engine_core.media import PLACEHOLDER, ROW_BYTES, rows_of
from tests.engine_core.random_requests import ARRIVALS, MAX_MODEL_LEN, Arrival, Expected, StepLostError, expect
from tests.engine_core.scheduling.test_scheduler_machine import _SETTINGS, CoreMachine
from tokenloom.engine_core.control.pausing import PauseMode
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.messages import ArrivedRows, RowsWanted
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.scheduling.request_order import SchedulingPolicy

IMAGES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from(["a", "b", "c", "d", "e"]), st.booleans()),
    min_size=1,
    max_size=4,
)
"""(Tokens before it, its rows, its file, and whether its tokens see each other), for each image of a prompt."""


class MediaCoreMachine(CoreMachine):
    """Adds requests with images, and brings rows when it likes; some pools of rows hold hardly more than one image."""

    spare_rows = 0
    brings_all = False

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[tuple[RowsWanted, int]] = []
        """What the core asks for, with the number of rows that were brought."""

    @initialize(spare_rows=st.sampled_from([0, 0, 4, 10, 1000]))
    def choose_room(self, spare_rows: int) -> None:
        self.spare_rows = spare_rows

    @rule(target=CoreMachine.requests, arrivals=st.lists(ARRIVALS, min_size=1, max_size=4), images=IMAGES)
    def add_images(self, arrivals: list[Arrival], images: list[tuple[int, int, str, bool]]) -> MultipleResults[str]:
        return multiple(*(self._add_images(arrival, images[index % 2 :]) for index, arrival in enumerate(arrivals)))

    @rule(count=st.integers(1, 4), piece=st.sampled_from([1, 2, 100]))
    def bring(self, count: int, piece: int) -> None:
        for wanted, num_brought in self.wanted[:count]:
            rows = rows_of(wanted.key)
            part = rows[num_brought : num_brought + piece]
            self.core.scheduler.take_rows(ArrivedRows(wanted.key, wanted.number, num_brought, part))
        self.wanted[:count] = [
            (wanted, num + piece) for wanted, num in self.wanted[:count] if num + piece < wanted.key.num_rows
        ]

    @rule()
    def reset_rows(self) -> None:
        self.core.scheduler.reset_rows()

    @precondition(lambda self: self.core.scheduler.requests and not self.core.pausing.is_paused)
    @rule()
    def lose_a_step(self) -> None:
        self.brings_all, self.mortal.dies = True, True
        try:
            for _ in range(50):
                if not self.core.scheduler.requests:
                    break
                self._step()
            assert not self.core.scheduler.requests, "requests were live, but nothing was executed"
        except StepLostError:
            pass
        self.brings_all = self.mortal.dies = False

    @precondition(lambda self: not self.core.pausing.is_paused)
    @rule(mode=st.sampled_from(list(PauseMode)), clear_cache=st.booleans())
    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self.brings_all = True
        super().pause(mode, clear_cache)
        self.brings_all = False

    @rule()
    def resume(self) -> None:
        self.core.resume()
        media = self.core.scheduler.media
        assert media is not None
        assert self.core.has_work() or len(media.parked) == len(self.core.scheduler.requests)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.brings_all = True
            self.core.resume()
            for _ in range(2000):
                self._bring_all()
                if not self.core.has_work():
                    break
                self._step()
            media = self.core.scheduler.media
            assert media is not None
            assert not media._entries
            assert not media._holdings
        super().teardown()

    def _step(self, aborted: Sequence[str] = ()) -> None:
        if self.brings_all:
            self._bring_all()
        super()._step(aborted)

    def _note_wanted(self, wanted: list[RowsWanted]) -> None:
        numbers = {each.number for each, _ in self.wanted}
        for each in wanted:
            if each.number not in numbers:
                numbers.add(each.number)
                self.wanted.append((each, 0))

    def _bring_all(self) -> None:
        while self.wanted:
            self.bring(len(self.wanted), 100)

    def _set_room(self) -> None:
        media, num_rows = self.core.scheduler.media, 6 + self.spare_rows
        assert media is not None
        if not self.core.scheduler.config.enable_chunked_prefill:  # a prompt needs all its images at once
            num_rows += 18
        media.capacity = num_rows * ROW_BYTES

    def _add_request(
        self, arrival: Arrival, prompt: list[int], expected: Expected, media: list[MediaSpan], tenant: str = ""
    ) -> str:
        expected.received.extend(expected.tokens[: arrival.num_accepted])
        request_id = f"r{self.num_added}"
        self.num_added += 1
        self.live[request_id] = expected
        request = make_request(
            request_id,
            prompt,
            arrival.max_tokens,
            accepted=expected.received,
            stop=arrival.stop,
            salt=arrival.salt,
            session=arrival.session,
            priority=arrival.priority if self.policy is SchedulingPolicy.PRIORITY else 0,
            tenant=tenant,
        )
        request.media = media
        self.core.add_request(request)
        return request_id

    def _add_images(self, arrival: Arrival, images: list[tuple[int, int, str, bool]]) -> str:
        self._set_room()
        prompt, hashed, media = [7] * (arrival.shared // 4), [7] * (arrival.shared // 4), []
        for gap, num_rows, name, is_whole in images:
            prompt, hashed = prompt + [5] * gap, hashed + [5] * gap
            whole = is_whole and num_rows <= self.core.scheduler.config.max_num_batched_tokens
            key = f"{name} {num_rows}".encode()  # a key says how many rows there are
            span = MediaSpan(len(prompt), num_rows, 0, key, num_rows, whole)
            rows = rows_of(span.rows_key)
            media.append(span)
            prompt, hashed = prompt + [PLACEHOLDER] * num_rows, hashed + embeds_ids(EmbedsSpan(0, rows))
        prompt, hashed = prompt + arrival.tail, hashed + arrival.tail
        if arrival.num_accepted == 3 and media:  # some prompts end with an image
            del prompt[-len(arrival.tail) :], hashed[-len(arrival.tail) :]
        if len(prompt) >= MAX_MODEL_LEN:
            prompt, hashed, media = [7], [7], []
        return self._add_request(arrival, prompt, expect(hashed, arrival.max_tokens, arrival.stop), media)


class SoundCoreMachine(MediaCoreMachine):
    """Adds requests with a sound beside each prompt: tokens follow from its rows, which the first step writes."""

    cross_rows = 7

    def _set_room(self) -> None:
        media = self.core.scheduler.media
        assert media is not None
        media.capacity = (self.cross_rows + self.spare_rows) * ROW_BYTES

    def _add_images(self, arrival: Arrival, images: list[tuple[int, int, str, bool]]) -> str:
        return self._add_sound(arrival, images[0][2] if images else "a")

    def _add(self, arrival: Arrival, tenant: str) -> str:
        return self._add_sound(arrival, "c", tenant)

    def _add_sound(self, arrival: Arrival, name: str, tenant: str = "") -> str:
        self._set_room()
        span = MediaSpan(0, 0, 0, name.encode(), self.cross_rows)
        prompt = [7] * arrival.shared + arrival.tail
        expected = expect(prompt, arrival.max_tokens, arrival.stop, beside=rows_of(span.rows_key))
        return self._add_request(arrival, prompt, expected, [span], tenant)

    def speak(self) -> None:
        """No session speaks: each of its turns would need a sound."""


pytestmark = pytest.mark.timeout(600)  # shrinking a failure takes minutes
TestMediaCoreMachine = MediaCoreMachine.TestCase
TestMediaCoreMachine.settings = settings(_SETTINGS, max_examples=100)
TestSoundCoreMachine = SoundCoreMachine.TestCase
TestSoundCoreMachine.settings = settings(_SETTINGS, max_examples=75)
