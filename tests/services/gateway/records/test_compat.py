"""Every field of the lists of other servers' APIs, sent to a gateway: it works, is refused by name or named as ignored.

A field works if the answer, or what reaches the mesh, differs from that of the same body without the field.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fake_encoders import with_encoders
from tests.services.gateway.fakes import FakeMesh, FakeRequest
from tokenloom.services.gateway.http.http_exchange import IGNORED_HEADER
from tokenloom.services.gateway.records.compat import FOREIGN_APIS, IGNORED_FIELDS, ForeignApi, top_field
from tokenloom.v1 import types_pb2

from .foreign_samples import SAMPLES, Sample, Samples

IGNORED = IGNORED_HEADER.decode()
REASONS = types_pb2.REASONING_MODE_FREE
LIMITS = types_pb2.ModelLimits(
    max_model_len=512,
    vocab_size=256,
    priorities=True,
    reasoning=REASONS,
    pooling_tasks=[types_pb2.POOLING_TASK_EMBED],
    matryoshka=True,
)
SAME_AS_BEFORE = {
    "model": "it names the only model",
    "length_penalty": "it ranks the outputs of a beam search, which the fake engine has not",
    "return_tokens_as_token_ids": "the fake engine returns no log probabilities",
}
"""Fields whose sample means what their absence means."""
NEEDS_AN_ENGINE = {"use_beam_search", "length_penalty"}
"""Fields that reach the fake engine, which cannot do what they ask for."""
OWN_FIELDS = {"previous_response_id": "resp_1", "conversation": "conv_1"}
NOT_OF_A_REQUEST = re.compile(rb"[0-9a-f]{32}|call_[0-9a-f]{24}|\"created(_at)?\": ?\d+")


def names_of(api: ForeignApi) -> list[str]:
    return [*api.works.split(), *api.refused, *api.ignored]


def test_the_lists_are_long_name_each_field_once_and_have_a_sample_of_each() -> None:
    names = [(api.name, name) for api in FOREIGN_APIS for name in names_of(api)]
    assert len(names) == len(set(names)) >= 120
    assert set(names) == {(api, name) for api, samples in SAMPLES.items() for name in samples.fields}
    assert {"user", "verbosity", "mm_processor_kwargs"} <= IGNORED_FIELDS
    assert "stream_options.include_obfuscation" not in IGNORED_FIELDS


@pytest.mark.parametrize("api", FOREIGN_APIS, ids=lambda api: api.name)
async def test_every_field_has_the_effect_that_is_listed(socket_dir: Path, api: ForeignApi) -> None:
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = LIMITS
    async with with_encoders(mesh), mesh.gateway(**settings), mesh.http() as http:
        mesh.outputs.auto = ["<think>Hm.</think>x"]
        mesh.outputs.pool = _pool
        samples = SAMPLES[api.name]
        found = [
            f"{name}: {fault}" for name in names_of(api) if (fault := await try_field(mesh, http, api, name, samples))
        ]
        assert "\n".join(found) == ""
        unknown = await http.post(api.path, json={**samples.base, "no_such_field": 1, "another": 2})
        assert (unknown.status_code, unknown.headers[IGNORED]) == (200, "no_such_field, another")


def _pool(request: FakeRequest) -> None:
    request.pool([1.0, 2.0])
    request.finish()


async def try_field(mesh: FakeMesh, http: httpx.AsyncClient, api: ForeignApi, name: str, samples: Samples) -> str:
    """Return what contradicts the list; empty if nothing does."""
    sample = samples.fields[name]
    value, needs = (sample.value, sample.needs) if isinstance(sample, Sample) else (sample, {})
    field = top_field(name)
    response, seen = await send(mesh, http, api.path, {**samples.base, **needs, field: value})
    ignored = response.headers.get(IGNORED, "").split(", ")
    if name in api.refused:
        last = re.findall(r"\w+", name.partition(" ")[0])[-1]
        is_named = response.status_code == 400 and last in response.text
        return "" if is_named else f"not refused by name: {response.status_code} {response.text[:200]}"
    if field in OWN_FIELDS:
        return "" if response.status_code == 404 and OWN_FIELDS[field] in response.text else response.text
    if response.status_code != 200 and name not in NEEDS_AN_ENGINE:
        return f"{response.status_code} {response.text[:300]}"
    if name in api.ignored:
        return "" if name in ignored else f"named are only {ignored}"
    if name in ignored or field in ignored:
        return f"ignored: {ignored}"
    _, before = await send(mesh, http, api.path, {**samples.base, **needs})
    return "" if seen != before or name in SAME_AS_BEFORE else "it changes nothing"


async def send(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> tuple[httpx.Response, tuple[object, ...]]:
    """Return the response to a body, and all that may depend on its fields."""
    tokenizers = (mesh.tokenizer, mesh.second_tokenizer)
    for tokenizer in tokenizers:
        tokenizer.chats.clear()
        tokenizer.prompts.clear()
    for session in mesh.outputs.sessions:
        session.requests.clear()
    response = await http.post(path, json=body)
    submits = [request.submit for session in mesh.outputs.sessions for request in session.requests.values()]
    for submit in submits:
        submit.ClearField("request_id")
        submit.ClearField("slot")
        submit.ClearField("timeout")
        if submit.sampling_params.HasField("seed") and "seed" not in body:
            submit.sampling_params.ClearField("seed")
    encoded = [str(asked) for tokenizer in tokenizers for asked in (*tokenizer.chats, *tokenizer.prompts)]
    whole = NOT_OF_A_REQUEST.sub(b"", response.content)
    return response, (whole, [str(submit) for submit in submits], encoded)
