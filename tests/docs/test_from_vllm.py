"""What the page for users of vLLM says of flags, arguments and metrics is so."""

import inspect
import re

from typer.main import get_command

from tokenloom import LLM
from tokenloom.cli.main import app
from tokenloom.offline.engine_args import EngineArgs, engine_config
from tokenloom.reference.from_vllm import OTHER_METRICS, PERMITTED_ARGUMENTS, SAME_ARGUMENTS, SAME_FLAGS, SAME_METRICS
from tokenloom.services.gateway.records.compat import FOREIGN_APIS

from .markdown_page import DOCS

PAGE = (DOCS / "start" / "from-vllm.md").read_text()
METRICS = set(re.findall(r"`vllm:(\w+)`", (DOCS / "reference" / "metrics.md").read_text()))


def options_of_serve() -> set[str]:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_flags_of_the_same_name_exist() -> None:
    assert set(SAME_FLAGS) <= options_of_serve()


def test_flags_to_use_instead_exist() -> None:
    own = options_of_serve()
    table = PAGE.partition("## Flags that have another name, or none")[2].partition("\n## ")[0]
    named = {flag for row in table.splitlines() for flag in re.findall(r"`(--[a-z-]+)`", row.split("|")[-2:][0])}
    assert len(named) > 20
    assert named <= own


def test_arguments_of_the_offline_class_are_taken_or_named() -> None:
    own = inspect.signature(LLM).parameters
    values = {
        "quantization": "int4",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1,
        "pooler_config": {},
        "disable_log_stats": False,
    }
    for name in SAME_ARGUMENTS:
        assert name in own or EngineArgs("model", **{name: values.get(name, "auto")}), name
    for name in PERMITTED_ARGUMENTS:
        assert name not in own
        assert engine_config({name: True}) == engine_config({name: False}) == engine_config({})


def test_metrics_of_the_same_name_exist_and_others_do_not() -> None:
    assert set(SAME_METRICS) <= METRICS
    assert not METRICS.intersection(OTHER_METRICS)


def test_every_request_field_is_named() -> None:
    part = PAGE.partition("## Request fields")[2].partition("\n## ")[0]
    for api, section in zip(FOREIGN_APIS, part.split("\n### ")[1:], strict=True):
        assert section.startswith(f"{api.name}\n")
        assert all(f"`{name}`" in section.partition("|")[0] for name in api.works.split())
        assert all(f"| `{name}` | refused |" in section for name in api.refused)
        assert all(f"| `{name}` | ignored |" in section for name in api.ignored)
