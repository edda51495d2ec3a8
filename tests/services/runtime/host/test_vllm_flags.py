"""What the answers to vLLM's flags name exists, and how they say that Tokenloom behaves is probed on a gateway."""

import asyncio
import hashlib
import json
import logging
import re
import shutil
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.docs.markdown_page import ROOT
from tests.engine_core.helpers import finish
from tests.engine_core.helpers import make_core as make_fake_core
from tests.engine_core.helpers import make_request as make_fake_request
from tests.services.gateway.fakes import FakeMesh
from tokenloom.cli.serve.serve_options import OFFERS
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.checkpoint.directory_source import DirectorySource
from tokenloom.gpu_worker.checkpoint.served_how import choose
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL, resolve
from tokenloom.preflight.model import check_checkpoint
from tokenloom.preflight.small_files import CannotServe
from tokenloom.request.errors import NotFound
from tokenloom.services.gateway.openapi.document import document
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.host.foreign_flags import ANSWERS
from tokenloom.services.runtime.host.options import flag, options_of
from tokenloom.services.tokenizer.chat_template import ChatTemplate
from tokenloom.services.tokenizer.template_probe import probe_forms
from tokenloom.v1 import engine_pb2, inference_pb2

CLAUSES = sorted(set(ANSWERS.values()))
API = document(admin=True, embeds=True, batches=True)
PROMPT, OUTPUT = "a dragon called Uma", "rode a bicycle"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}


def names_what_exists(clause: str, token: str) -> bool | None:
    """Say whether what a clause names exists; None for a clause that says how Tokenloom behaves."""
    verb, _, rest = clause.partition(" ")
    match verb:
        case "use" if not (route := rest.partition("and POST ")[2]):
            return True  # test_foreign_flags.py compares the options
        case "use":
            return route in API["paths"]
        case "run":
            return "unix:/path" in options_of(GatewaySettings)["http_listen"].text
        case "send":
            return all(_is_field(name) for name in re.split(r", | or ", rest.removesuffix(" in the request")))
        case "set":
            name = rest.rpartition(" ")[2]
            return (
                huggingface_hub.get_token() == token
                if name == "HF_TOKEN"
                else name in Path(constants.__file__).read_text()
            )
        case "see" if rest.startswith("GET "):
            return re.findall(r"/\w+", rest)[0] in API["paths"]
        case "see":
            return all((ROOT / page).exists() for page in rest.split(" and "))
        case "call":
            service, method = rest.split(".")
            return method in engine_pb2.DESCRIPTOR.services_by_name[service].methods_by_name
        case "edit":
            return (DEMO_MODEL / rest.partition(" ")[0]).exists()
    return None


def _is_field(path: str) -> bool:
    schema = API["components"]["schemas"]["ChatCompletionRequest"]
    for name in path.split("."):
        if name not in schema["properties"]:
            return False
        reference = re.search(r"#/components/schemas/(\w+)", json.dumps(schema["properties"][name]))
        schema = API["components"]["schemas"][reference[1]] if reference else {}
    return True


async def serves_grpc(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    async with mesh.inference() as inference:
        answer = await inference.ListModels(inference_pb2.ListModelsRequest())
        return len(answer.models) == 1


async def names_requests(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    async with mesh.http() as http:
        responses = [await http.get(path) for path in ("/load", "/v1/models", "/nothing")]
        return all(response.headers["x-request-id"] for response in responses)


async def logs_requests(mesh: FakeMesh, log: pytest.LogCaptureFixture) -> bool:
    await _chat(mesh)
    return any("/v1/chat/completions" in str(vars(record)) for record in log.records)


async def logs_no_text(mesh: FakeMesh, log: pytest.LogCaptureFixture) -> bool:
    log.set_level(logging.DEBUG)
    assert OUTPUT in json.dumps(await _chat(mesh))
    logged = "".join(str(vars(record)) for record in log.records)
    return bool(logged) and PROMPT not in logged and OUTPUT not in logged


async def counts_cached_tokens(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    return "cached_tokens" in (await _chat(mesh))["usage"]["prompt_tokens_details"]


async def answers_as_assistant(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    return bool((await _chat(mesh))["choices"][0]["message"]["role"] == "assistant")


async def prepares_by_the_files(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    async with mesh.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "mm_processor_kwargs": {"do_resize": 1}}
        response = await http.post("/v1/chat/completions", json=body)
        return response.status_code == 400 and "there are: fps, max_pixels" in response.text


async def runs_no_code(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd", "auto_map": {"AutoModelForCausalLM": "odd.Odd"}}
    (mesh.directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotServe, match="never run"):
        check_checkpoint(mesh.directory)
    return True


async def takes_revisions(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    asked = {}

    def snapshot_download(name: str, *, revision: str | None = None, **_: object) -> str:
        asked.setdefault(name, revision)  # the weights are asked for by the commit that this gave
        return str(DEMO_MODEL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        resolve("org/name@v2")
    return asked == {"org/name": "v2"}


async def finds_the_form(_: FakeMesh, __: pytest.LogCaptureFixture) -> bool:
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    reads_parts = ["user" in probe_forms(ChatTemplate(source)).in_parts for source in (texts, parts)]
    return reads_parts == [False, True]


async def gives_own_logprobs(_: FakeMesh, __: pytest.LogCaptureFixture) -> bool:
    config = EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL), num_threads=1, enforce_eager=True),
        cache=CacheConfig(num_blocks=16),
        max_model_len=64,
    )
    core = EngineCore(config, UniProcExecutor(CPUWorker(config)))
    changed = {"temperature": 0.1, "frequency_penalty": 2.0, "repetition_penalty": 2.0, "logit_bias": {7: 5.0}}
    for name, how in (("plain", {"temperature": 0.0}), ("changed", changed)):
        params = CoreSamplingParams(max_tokens=1, seed=0, logprobs=900, **how)
        core.add_request(EngineCoreRequest(name, [300, 7, 300, 8], params))
    of_tokens = {}
    for name, [output] in finish(core).items():
        found = output.new_logprobs
        assert found is not None
        of_tokens[name] = dict(zip(found.token_ids, found.logprobs, strict=True))
    return of_tokens["plain"] == pytest.approx(of_tokens["changed"], abs=1e-5)


async def makes_tokenizers(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    fast = load_tokenizer(DEMO_MODEL)
    model = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    (mesh.directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    (mesh.directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (mesh.directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    made = load_tokenizer(mesh.directory)
    return made.encode(PROMPT).tokens == fast.encode(PROMPT).tokens != []


async def takes_token_ids(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    with pytest.raises(NotFound, match="no tokenizer"):
        load_tokenizer(mesh.directory)
    body = {"prompt": [1, 2, 3], "detokenize": False}
    async with mesh.http() as http, asyncio.TaskGroup() as group:
        answer = group.create_task(http.post("/v1/completions", json=body))
        request = await mesh.outputs.next_request()
        request.answer("")
    text = request.submit.text
    assert (text.HasField("detokenize"), text.detokenize) == (True, False)
    return answer.result().status_code == 200 and not mesh.tokenizer.prompts


async def reads_one_directory(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    path = mesh.directory / "model"
    shutil.copytree(DEMO_MODEL, path)
    check_checkpoint(path)
    for name in ("model.safetensors", "config.json"):
        (path / name).rename(mesh.directory / name)  # beside the directory
        with pytest.raises(CannotServe):
            check_checkpoint(path)
        (mesh.directory / name).rename(path / name)
    return True


async def maps_files(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    shutil.copy(DEMO_MODEL / "model.safetensors", mesh.directory)
    source = DirectorySource(mesh.directory, None)
    tensors = [source.read(name, ()) for name in source.names]
    maps = _maps()
    source.close()
    return bool(tensors) and str(mesh.directory / "model.safetensors") in maps


async def names_blocks_by_sha256(_: FakeMesh, __: pytest.LogCaptureFixture) -> bool:
    core = make_fake_core(block_size=4)
    core.add_request(make_fake_request("a", range(5)))
    request = core.scheduler.requests["a"]
    finish(core)
    return request.kv.block_hashes[0] == hashlib.sha256(struct.pack("<4I", *range(4))).digest()


async def decides_itself(mesh: FakeMesh, _: pytest.LogCaptureFixture) -> bool:
    of_table = [names for names, answer in ANSWERS.items() if answer.startswith("there is no such choice")]
    decided = set(" ".join(of_table).split())
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (mesh.directory / "config.json").write_text(json.dumps(config))
    assert choose(DEMO_MODEL).by != choose(mesh.directory).by
    return len(decided) > 10 and not decided & _own_flags()


def _maps() -> str:
    return Path("/proc/self/maps").read_text()


def _own_flags() -> set[str]:
    return {flag(name) for offer in OFFERS.values() for name in offer.option.names}


async def _chat(mesh: FakeMesh) -> dict[str, object]:
    mesh.outputs.auto = [OUTPUT]
    async with mesh.http() as http:
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
        assert isinstance(answer, dict)
        return answer


Probe = Callable[[FakeMesh, pytest.LogCaptureFixture], Awaitable[bool]]
PROBES: dict[str, Probe] = {
    "gRPC is always served, on --grpc-port": serves_grpc,
    "every response carries x-request-id": names_requests,
    "the gateway logs each request that has ended": logs_requests,
    "prompts and outputs are never logged": logs_no_text,
    "usage always holds the number of cached prompt tokens": counts_cached_tokens,
    "answers always have the role assistant": answers_as_assistant,
    "images, videos and sounds are prepared as the checkpoint's files say": prepares_by_the_files,
    "code of a checkpoint is never run": runs_no_code,
    "the tokenizer finds out which form the chat template reads": finds_the_form,
    "write the revision after the name of the model: org/name@REVISION": takes_revisions,
    "log probabilities are the model's own, before penalties and temperature (raw_logprobs)": gives_own_logprobs,
    "the fast tokenizer of the checkpoint is used; one that has no tokenizer.json is converted": makes_tokenizers,
    "the tokenizer is always loaded; send token ids, and detokenize false": takes_token_ids,
    "a model is one directory, with config.json and its weights": reads_one_directory,
    "files are mapped into memory": maps_files,
    "blocks are always named by SHA-256": names_blocks_by_sha256,
    "there is no such choice: the engine decides by the device and the model": decides_itself,
}
"""A probe for each clause that says how Tokenloom behaves."""


@pytest.mark.parametrize("clause", CLAUSES)
async def test_a_clause_is_so(
    clause: str, socket_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token")
    exists = names_what_exists(clause, "a-token")
    if exists is not None:
        assert exists
        return
    caplog.set_level(logging.INFO)
    async with FakeMesh(socket_dir).gateway() as mesh:
        assert await PROBES[clause](mesh, caplog)


def test_every_probe_has_its_clause() -> None:
    assert set(PROBES) <= set(CLAUSES)


def test_what_does_not_exist_is_found() -> None:
    missing = (
        "send no_such_field in the request",
        "see docs/no-page.md",
        "call EngineAdmin.Fly",
        "use --api-key, and POST /fly",
    )
    assert [names_what_exists(clause, "") for clause in missing] == [False] * len(missing)
