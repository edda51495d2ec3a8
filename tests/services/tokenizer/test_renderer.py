"""Tests that a template that loops, takes memory or dies affects only its own request."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn, Self

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.process.helper_pipe import OUT_OF_MEMORY
from tokenloom.request import errors
from tokenloom.services.runtime import helper_process
from tokenloom.services.tokenizer.render_worker import RenderJob, RenderSetup
from tokenloom.services.tokenizer.renderer import MAX_DEATHS, Renderer, RenderProcess

# Obeys the conversation: the first message says what to do.
OBEDIENT = """
{%- set word = messages[0].content -%}
{%- if word == 'loop' -%}{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == 'memory' -%}{{- ('x' * 2000000000) | length -}}
{%- elif word == 'long' -%}{%- for i in range(99999) -%}{{- 'x' * 999 -}}{%- endfor -%}
{%- elif word == 'refuse' -%}{{- raise_exception('not this one') -}}
{%- else -%}{{- word -}}{%- endif -%}
"""


@asynccontextmanager
async def rendering(num_workers: int = 1, seconds: float = 60.0) -> AsyncIterator[Renderer]:
    renderer = Renderer(OBEDIENT, {}, num_workers=num_workers, seconds=seconds)
    await renderer.start()
    try:
        yield renderer
    finally:
        await renderer.close()


def job(word: str) -> RenderJob:
    return raw_job(json.dumps([{"role": "user", "content": word}]))


def raw_job(messages_json: str) -> RenderJob:
    return RenderJob(
        messages_json=messages_json,
        tools_json="",
        template_kwargs_json="",
        add_generation_prompt=True,
        continue_final_message=False,
    )


async def test_renders_many_at_once() -> None:
    async with rendering(num_workers=2) as renderer:
        words = [f"number {i} é😀" for i in range(20)]
        rendered = await asyncio.gather(*(renderer.render(job(word)) for word in words))
        assert [each.text for each in rendered] == words


BAD = [
    (job("refuse"), errors.InvalidArgument, "not this one"),
    (job("long"), errors.ResourceExhausted, "longer than"),
    (job("memory"), errors.ResourceExhausted, "memory"),
    (raw_job("[1"), errors.InvalidArgument, "not the expected JSON"),
    (raw_job("7"), errors.InvalidArgument, "expected, not int"),
    (raw_job("[7]"), errors.InvalidArgument, "has int"),
    (raw_job("[]") | {"continue_final_message": True}, errors.InvalidArgument, "no final message"),
    (raw_job("[{}]") | {"template_kwargs_json": "[]"}, errors.InvalidArgument, "has list"),
    (raw_job('[{"role": "user", "content": "\\ud83d"}]'), errors.InvalidArgument, "surrogate"),
    (raw_job("[" * 100_000), errors.InvalidArgument, "recursion"),
]


async def test_a_bad_conversation_gets_its_error_and_the_next_its_text() -> None:
    async with rendering() as renderer:  # one process for all: it takes a moment to start
        for bad, error, message in BAD:
            with pytest.raises(error, match=message):
                await renderer.render(bad)
            assert (await renderer.render(job("fine"))).text == "fine"


async def test_a_loop_is_cut_off_and_its_worker_replaced() -> None:
    async with rendering(seconds=0.1) as renderer:
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.1 s of processor time"):
            await renderer.render(job("loop"))
        assert (await renderer.render(job("fine"))).text == "fine"


async def test_a_cancelled_call_leaves_a_working_renderer() -> None:
    async with rendering() as renderer:
        call = asyncio.create_task(renderer.render(job("loop")))
        waiting = asyncio.create_task(renderer.render(job("second")))
        done, _ = await asyncio.wait([call], timeout=0.2)
        assert not done
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        assert (await waiting).text == "second"


def idle(renderer: Renderer) -> RenderProcess:
    """Return the only worker, which stays idle."""
    worker = renderer._idle.get_nowait()
    assert worker is not None
    renderer._idle.put_nowait(worker)
    return worker


async def test_a_worker_that_died_while_it_was_idle_costs_nothing() -> None:
    async with rendering() as renderer:
        worker = idle(renderer)
        worker._process.kill()
        with pytest.raises(asyncio.IncompleteReadError):
            await worker.reader.readexactly(1)
        assert (await renderer.render(job("fine"))).text == "fine"
        assert idle(renderer) is not worker


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
async def test_a_conversation_goes_on_in_another_worker(signal_: signal.Signals) -> None:
    async with rendering() as renderer:
        worker = idle(renderer)
        worker._process.send_signal(signal_)  # not noticed yet
        rendering_ = asyncio.create_task(renderer.render(job("fine")))
        await settle()
        pass_time(1)
        assert (await rendering_).text == "fine"
        assert idle(renderer) is not worker


class Mortal(RenderProcess):
    """A worker that ends with a status at each job."""

    status = -signal.SIGKILL
    was_stopped = False
    num_started = 0

    @classmethod
    async def start(cls, setup: RenderSetup) -> Self:
        cls.num_started += 1
        worker = object.__new__(cls)
        worker.reader = asyncio.StreamReader()
        return worker

    async def talk(self, request: bytes, seconds: float) -> bytes:
        raise ConnectionResetError

    async def kill(self) -> int:
        return self.status


@pytest.mark.parametrize(
    ("status", "error", "num_started"),
    [
        (-signal.SIGKILL, errors.Internal, MAX_DEATHS),
        (-signal.SIGABRT, errors.ResourceExhausted, 1),
        (OUT_OF_MEMORY, errors.ResourceExhausted, 1),
        (-signal.SIGPROF, errors.DeadlineExceeded, 1),
        (-signal.SIGALRM, errors.Unavailable, 1),
    ],
)
async def test_only_its_own_limits_are_the_conversations_fault(
    status: int, error: type[errors.TokenloomError], num_started: int
) -> None:
    class Worker(Mortal):
        pass

    Worker.status = status
    with pytest.raises(error):
        await Renderer(OBEDIENT, {}, num_workers=1, seconds=5, start_worker=Worker.start).render(job("fine"))
    assert Worker.num_started == num_started


async def test_a_machine_that_stops_workers_is_no_fault_of_the_conversation() -> None:
    class Worker(Mortal):
        was_stopped = True

    with pytest.raises(errors.Unavailable, match="stops the processes that are to render"):
        await Renderer(OBEDIENT, {}, num_workers=1, seconds=5, start_worker=Worker.start).render(job("fine"))
    assert Worker.num_started == MAX_DEATHS


@pytest.mark.parametrize(
    "failure", [BlockingIOError("no process is left"), errors.InvalidArgument("no memory", "model")]
)
async def test_a_worker_that_does_not_start_again_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*_: object) -> NoReturn:
        raise failure

    async with rendering() as renderer:
        await idle(renderer).kill()
        with monkeypatch.context() as patch:
            patch.setattr(helper_process, "_spawn", fail)
            with pytest.raises(errors.Unavailable, match="does not start"):
                await renderer.render(job("fine"))
        assert (await renderer.render(job("fine"))).text == "fine"


async def test_a_template_that_does_not_compile_ends_the_start() -> None:
    with pytest.raises(errors.InvalidArgument, match="the chat template is not valid Jinja"):
        await Renderer("{% for %}", {}, num_workers=1, seconds=5).start()


async def test_constants_are_folded_in_the_worker_too() -> None:
    renderer = Renderer("{{ 'x' * 2000000000 }}", {}, num_workers=1, seconds=5)
    await renderer.start()
    with pytest.raises(errors.ResourceExhausted, match="memory"):
        await renderer.render(job("any"))
    await renderer.close()
