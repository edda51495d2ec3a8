"""Pairs of request fields: each is served, refused for a reason that is listed, or named as giving way."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.services.gateway.fake_encoders import with_encoders
from tests.services.gateway.fakes import FakeMesh, FakeRequest
from tokenloom.services.gateway.records.compat import EXCLUSIONS, FOREIGN_APIS, Exclusion, top_field

from .foreign_samples import SAMPLES, SCHEMA, TOOL, Sample
from .test_compat import IGNORED, LIMITS, OWN_FIELDS

PATHS = tuple(dict.fromkeys(api.path for api in FOREIGN_APIS))
BEAMS = {"use_beam_search", "length_penalty"}
"""The fake engine cannot search: what it answers is 503."""
MEDIA = {"image_url", "input_audio", "audio_url", "video_url"}
"""Parts that are no text."""


class Row(NamedTuple):
    """A field that works, or a member of one."""

    name: str
    value: Any
    needs: Mapping[str, Any]

    @property
    def field(self) -> str:
        return top_field(self.name)


def rows_of(path: str) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Return the smallest body of a route, and the rows of each of its fields."""
    base: dict[str, Any] = {}
    rows: dict[str, list[Row]] = {}
    for api in FOREIGN_APIS:
        if api.path != path:
            continue
        samples = SAMPLES[api.name]
        base = base or samples.base
        for name in api.works.split():
            sample = samples.fields[name]
            row = Row(name, sample.value, sample.needs) if isinstance(sample, Sample) else Row(name, sample, {})
            if row.field not in OWN_FIELDS:
                rows.setdefault(row.field, []).append(row)
    return base, rows


def pairs(rows: Mapping[str, list[Row]]) -> Iterator[tuple[Row, Row]]:
    """Yield a pair of rows for each pair of fields, members of a field by turns; all of those that exclude each other.

    Left out are pairs that cannot stand in one body, since one needs another value of a field than the other.
    """
    for turn, (one, other) in enumerate(combinations(rows, 2)):
        every = [(a, b) for a in rows[one] for b in rows[other]]
        chosen = every if exclusion(one, other) is not None else [every[turn % len(every)]]
        for a, b in chosen:
            wanted = [{**a.needs, a.field: a.value}, {**b.needs, b.field: b.value}]
            if all(wanted[0][name] == wanted[1][name] for name in wanted[0].keys() & wanted[1].keys()):
                yield a, b


def exclusion(*fields: str) -> Exclusion | None:
    """Return why a pair of fields is not served, if the list says so."""
    for each in EXCLUSIONS:
        one, other = set(each.one.split()), set(each.other.split())
        if any(first in one and second in other for first, second in (fields, fields[::-1])):
            return each
    return None


def _pool(request: FakeRequest) -> None:
    request.pool([1.0, 2.0])
    request.finish()


@pytest.mark.parametrize("path", PATHS)
async def test_each_pair_is_served_or_refused_for_a_listed_reason(socket_dir: Path, path: str) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = LIMITS
    base, rows = rows_of(path)
    faults = []
    gateway = mesh.gateway(tool_call_parser="hermes", reasoning_parser="qwen3")
    async with with_encoders(mesh), gateway, mesh.http() as http:
        mesh.outputs.auto = ["<think>Hm.</think>x"]
        mesh.outputs.pool = _pool
        for a, b in pairs(rows):
            body = {**base, **a.needs, **b.needs, a.field: a.value, b.field: b.value}
            if path == "/v1/embeddings" and "messages" in (a.field, b.field) and "input" not in (a.field, b.field):
                del body["input"]
            if fault := await _fault(http, path, body, a, b):
                faults.append(f"{a.name} with {b.name}: {fault}")
    assert "\n".join(faults) == ""


async def _fault(http: httpx.AsyncClient, path: str, body: Mapping[str, Any], a: Row, b: Row) -> str:
    """Return what contradicts the list; empty if nothing does. Whether members of excluded fields clash depends on
    them: either outcome is right, unless the request fails."""
    response = await http.post(path, json=body)
    named = {top_field(name.partition("#")[0]) for name in response.headers.get(IGNORED, "").split(", ")}
    fields = {*body}
    if any(name in MEDIA for row in (a, b) for name in row.name.split(".")):
        fields.add("mm_processor_kwargs")  # what excludes the options of images and sounds excludes these too
    listed = [each for one, other in combinations(fields, 2) if (each := exclusion(one, other)) is not None]
    if response.status_code == 200:
        lost = named & {a.field, b.field}
        may_give_way = {name for each in listed if each.gives_way for name in each.other.split()}
        return f"named as ignored: {lost}" if lost - may_give_way else ""
    if response.status_code == 503 and BEAMS & fields:
        return ""
    is_refused = response.status_code == 400 and any(not each.gives_way for each in listed)
    return "" if is_refused else f"{response.status_code} {response.text[:200]}"


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CALL = {"tools": [TOOL], "tool_choice": "required"}
IMAGE = {
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}],
    "mm_processor_kwargs": {"max_pixels": 9},
}
CONFLICTS: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("/v1/chat/completions", {"response_format": FORM, "structured_outputs": {"regex": "a"}}, 400, ""),
    ("/v1/chat/completions", {"stop": "a", "detokenize": False}, 400, ""),
    ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, 400, ""),
    ("/v1/completions", {"use_beam_search": True, "stream": True}, 400, ""),
    ("/v1/completions", {"use_beam_search": True, "stop": "a"}, 400, ""),
    ("/v1/completions", {"use_beam_search": True, "presence_penalty": 1.0}, 400, ""),
    ("/v1/completions", {"use_beam_search": True, "structured_outputs": {"regex": "a"}}, 400, ""),
    ("/v1/chat/completions", {"truncate_prompt_tokens": 9, **IMAGE}, 400, ""),
    ("/v1/responses", {"background": True, "store": False}, 400, ""),
    ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, 400, ""),
    ("/v1/chat/completions", {**CALL, "response_format": FORM}, 200, "response_format"),
    ("/v1/chat/completions", {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, 200, "guided_regex"),
)


async def test_each_listed_reason_applies(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = LIMITS
    async with with_encoders(mesh), mesh.gateway(), mesh.http() as http:
        mesh.outputs.auto = ["x"]
        for (path, fields, status, ignored), listed in zip(CONFLICTS, EXCLUSIONS, strict=True):
            assert any(exclusion(*pair) == listed for pair in combinations(fields, 2)), fields
            response = await http.post(path, json={**rows_of(path)[0], **fields})
            assert (response.status_code, response.headers.get(IGNORED, "")) == (status, ignored), fields
