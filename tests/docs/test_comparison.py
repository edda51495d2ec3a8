"""Each sentence of the comparison about Tokenloom has a probe."""

import itertools
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.main import get_command

from tokenloom.cli.main import app
from tokenloom.cli.serve.run import MODELS
from tokenloom.engine_core.data.config import EngineConfig, KVConfig, SchedulerConfig
from tokenloom.gpu_worker.checkpoint.files.text_part import WRAPPERS
from tokenloom.gpu_worker.kernels import triton
from tokenloom.gpu_worker.kernels.levels import LEVELS
from tokenloom.gpu_worker.platform.platform import check_device
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.reference.service_pages import SERVICES
from tokenloom.request.errors import ModelNotFound, ResourceExhausted
from tokenloom.services.gateway.records.compat import FOREIGN_APIS
from tokenloom.services.gateway.records.model_names import ModelNames
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.host.options import gpu_defaults, options_of
from tokenloom.services.runtime.peers.callers import CALLERS
from tokenloom.supervisor.layout import MeshOptions, parts_of
from tokenloom.supervisor.ports import GatewayPorts
from tokenloom.v1 import coordinator_pb2, engine_pb2, kv_transfer_pb2, output_processor_pb2, tokenizer_pb2

from .markdown_page import DOCS, ROOT

PAGE = (DOCS / "understand" / "comparison.md").read_text()
FEATURES = (DOCS / "reference" / "features.md").read_text()
INSIDE = (coordinator_pb2, engine_pb2, kv_transfer_pb2, output_processor_pb2, tokenizer_pb2)


def claims() -> Iterator[str]:
    """Yield the sentences that begin with Tokenloom, those after them in their points, and the cells of its column."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    prose = re.sub(r"^- \*\*.*?\*\* ", "\n\n", sections[1], flags=re.MULTILINE)
    for paragraph in prose.split("\n\n"):
        sentences = re.split(r"(?<=\.) ", " ".join(paragraph.split()))
        yield from itertools.dropwhile(lambda sentence: not sentence.startswith("Tokenloom"), sentences)
    for row in "".join(sections[2:]).splitlines():
        if row.startswith("|") and not row.startswith(("|--", "| |")):
            yield row.split("|")[-2].strip()


def parallel_on_cpus() -> bool:
    return all(
        re.search(rf"\| {name}.*\| works", FEATURES)
        for name in ("tensor parallel", "pipeline parallel", "context parallel", "expert parallel", "data parallel")
    )


def gpus_are_to_come() -> bool:
    kernels = list(Path(*triton.__path__).glob("*.py"))
    rows = ("Triton kernels of a GPU", "CUDA graphs of decode steps")
    return len(kernels) > 5 and all(re.search(rf"\| {row}.*\| later", FEATURES) for row in rows)


def images_sounds_and_frames() -> bool:
    works = [name for api in FOREIGN_APIS for name in api.works.split()]
    read = {f"messages[].content[].{part}" for part in ("image_url", "input_audio", "video_url")}
    shown = {each.kind.removesuffix("_moe") for each in WRAPPERS.values() if "video" in each.media}
    return read <= {*works} and len(shown) == 8


def nixl_moves_host_memory() -> bool:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), pool_is_on_host=False)
    with pytest.raises(ValueError, match="nixl moves no KV on cuda"):
        check_device(EngineConfig(kv=KVConfig(transports=("nixl",))), gpu)
    return True


def plans_and_has_manifests() -> bool:
    options = {name for each in get_command(app).commands["plan"].params for name in each.opts}  # type: ignore[attr-defined]
    manifests = "".join(path.read_text() for path in (ROOT / "k8s").rglob("*.yaml"))
    return "--apply" in options and "kind: Deployment" in manifests and "CustomResourceDefinition" not in manifests


def has_services(*names: str) -> bool:
    return set(names) <= {service.service for service in SERVICES}


def frames_and_credit() -> bool:
    messages = engine_pb2.DESCRIPTOR.message_types_by_name
    columns = [messages["EngineFrame"].fields_by_name[name] for name in ("slot", "num_tokens", "token_ids")]
    return all(column.is_repeated for column in columns) and "credit" in messages["EngineInput"].fields_by_name


def verifies_leases() -> bool:
    methods = kv_transfer_pb2.DESCRIPTOR.services_by_name["KVTransfer"].methods_by_name
    return {"Acquire", "Release"} <= set(methods) and KVConfig().policy == "recompute"


def disaggregates_on_cpus() -> bool:
    overlay = (ROOT / "k8s" / "overlays" / "disaggregated").rglob("*.yaml")
    return "prefill" in "".join(path.read_text() for path in overlay)


def checks_callers() -> bool:
    services = [service for file in INSIDE for service in file.DESCRIPTOR.services_by_name.values()]
    methods = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    return len(methods) > 20 and all(any(method.startswith(prefix) for prefix in CALLERS) for method in methods)


def linux_on_x86() -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    systems = [each for each in project["classifiers"] if each.startswith("Operating System")]
    return systems == ["Operating System :: POSIX :: Linux"] and any(level.machine == "x86_64" for level in LEVELS)


def arm_is_built_only() -> bool:
    notes = " ".join(FEATURES.split())
    return (
        any(level.machine == "aarch64" for level in LEVELS) and "aarch64 are built, and have not computed yet" in notes
    )


def lists_models() -> bool:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    return {"run", "serve", "fetch"} <= commands.keys() and 1 < len(MODELS) < 20


def refuses_unknown_models() -> bool:
    no_adapters: Any = SimpleNamespace(adapters={})
    names = ModelNames(("a",), no_adapters)
    with pytest.raises(ModelNotFound, match="model 'b' is not served"):
        names.find("b")
    return True


def starts_a_process_for_each_part() -> bool:
    parts = parts_of(MeshOptions(model=DEMO_MODEL, served_model_name="m"), Path("any"), [GatewayPorts(8000, 8001)])
    return {part.service for part in parts} == {service.service for service in SERVICES} - {"encoder", "relay"}


def kernels_in_cpp() -> bool:
    sources = [path for path in (ROOT / "gpu_worker" / "kernels").rglob("*") if path.suffix in (".cpp", ".h")]
    return len(sources) > 10


def reads_published_checkpoints() -> bool:
    return any(DEMO_MODEL.glob("*.safetensors")) and works(r"\[GGUF files\]")


def batches_and_refuses() -> bool:
    counts = SchedulerConfig().max_num_seqs, gpu_defaults(SchedulerConfig(), ())["max_num_seqs"]
    return counts == (128, 256) and ResourceExhausted.http_status == 503


def works(row: str) -> bool:
    return re.search(rf"^\| .*{row}.* \| works", FEATURES, re.MULTILINE) is not None


def spans_machines() -> bool:
    return checks_callers() and works("workers in actors of a Ray cluster")


def has_tenants() -> bool:
    options = {"api_key_file", "tenant_live_outputs", "tenant_tokens_per_second", "tenant_sessions"}
    return options <= options_of(GatewaySettings).keys()


PROBES: dict[str, Callable[[], bool]] = {
    "Tokenloom has tensor, pipeline, context, expert and data parallelism too, and runs them on "
    "CPUs.": parallel_on_cpus,
    "Tokenloom's GPU path has Triton kernels and graphs of decode steps, and has run on one GPU by a check alone "
    "([features.md](../reference/features.md)).": gpus_are_to_come,
    "Tokenloom's models read text, images and sounds, and those of eight families the frames of videos.": (
        images_sounds_and_frames
    ),
    "Tokenloom's nixl transport moves host memory only.": nixl_moves_host_memory,
    "Tokenloom has manifests, and a planner that changes the roles of engines (`tokenloom plan --apply`), but no "
    "operator.": plans_and_has_manifests,
    "Tokenloom runs on Linux, on x86-64 CPUs.": linux_on_x86,
    "Its kernels for ARM have never computed.": arm_is_built_only,
    "Tokenloom has a short list of models that `tokenloom run` downloads and serves, and any other is a path or a hub "
    "id.": lists_models,
    "A request for a model that is not served is refused, not loaded.": refuses_unknown_models,
    "Tokenloom starts a process for each part, which costs memory that a single user gains nothing "
    "from.": starts_a_process_for_each_part,
    "services in Python, kernels in C++": kernels_in_cpp,
    "x86-64 CPUs; kernels for GPUs that have not run on one": lambda: linux_on_x86() and gpus_are_to_come(),
    "checkpoints in safetensors as published, and GGUF files": reads_published_checkpoints,
    "128 in a batch of an engine, 256 on a GPU; a request that would wait for too long gets 503": batches_and_refuses,
    "a mesh for each, all loaded": lambda: works("several models behind one gateway, a mesh for each"),
    "services and workers on any of them, with mutual TLS between services": spans_machines,
    "requests go on in another engine": lambda: works("engine that decodes is killed during an answer, which goes on"),
    "keys, tenants, and their shares and limits": has_tenants,
    "seven small services": lambda: len(SERVICES) == 7,
    "tokenizer and output processor, separate services": lambda: has_services("tokenizer", "output_processor"),
    "gRPC, frames of many requests in columns, credit against slow readers": frames_and_credit,
    "built in; leases verified after the copy, otherwise recomputed": verifies_leases,
    "the whole mesh, disaggregated too": disaggregates_on_cpus,
    "mutual TLS between all parts, callers checked by certificate name": checks_callers,
}


def test_every_claim_has_a_probe() -> None:
    assert sorted(claims()) == sorted(PROBES)


@pytest.mark.parametrize("claim", PROBES)
def test_the_claim_is_so(claim: str) -> None:
    assert PROBES[claim]()
