"""Tests that a template that loops, takes memory or dies affects only its own request."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.request import errors
from tokenloom.services.tokenizer.render_worker import RenderJob
from tokenloom.services.tokenizer.renderer import Renderer

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
    async with rendering(seconds=20) as renderer:
        looping = asyncio.create_task(renderer.render(job("loop")))
        await settle()
        pass_time(20)
        with pytest.raises(errors.DeadlineExceeded):
            await looping
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


async def test_a_worker_that_died_is_replaced() -> None:
    async with rendering() as renderer:
        worker = renderer._idle.get_nowait()
        assert worker is not None
        worker._process.kill()
        renderer._idle.put_nowait(worker)
        with pytest.raises(errors.ResourceExhausted):
            await renderer.render(job("lost"))
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
