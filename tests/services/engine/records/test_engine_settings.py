"""How an engine's options become the configuration of its core."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tokenloom.engine_core.data.config import (
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.services.engine.records import engine_settings
from tokenloom.services.engine.records.engine_settings import EngineSettings, for_checkpoint


def test_the_model_that_drafts_is_found_by_name() -> None:
    config = EngineConfig(speculative=SpeculativeConfig("draft_model", model=DEMO_MODEL_NAME))
    found = for_checkpoint(config, "").speculative
    assert found == SpeculativeConfig("draft_model", model=str(DEMO_MODEL.resolve()))


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = EngineConfig(speculative=SpeculativeConfig("eagle", model=str(tmp_path)))
    with pytest.raises(ValueError, match=r"speculative_config: model .* has no config\.json"):
        for_checkpoint(config, "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngram", "model": "a"}, "the method ngram has no model"),
        ({"method": "eagle"}, "the method eagle needs the checkpoint that drafts"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min is 6 and prompt_lookup_max is 5"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings.of(speculative_config=values)


def test_flag_environment_and_file_hold_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, expected = '{"method": "ngram", "num_speculative_tokens": 4}', SpeculativeConfig("ngram", 4)
    assert EngineSettings.load(["--speculative-config", text]).engine.speculative == expected
    file = tmp_path / "engine.toml"
    file.write_text('[speculative_config]\nmethod = "ngram"\nnum_speculative_tokens = 4\n')
    assert EngineSettings.load(["--config", str(file)]).engine.speculative == expected
    monkeypatch.setenv("TOKENLOOM_SPECULATIVE_CONFIG", text)
    assert EngineSettings.load([]).engine.speculative == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_config": '{"method":"ngram","num_speculative_tokens":3}'}, "--speculative-config"),
        ({"role": "prefill"}, "--role"),
        ({"num_kv_blocks": 5, "quantization": "int4"}, "--quantization, --num-kv-blocks"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"kv_events_config": "{}"}, "--kv-events-config"),
    ],
)
def test_where_vllm_computes_options_of_a_core_are_refused_by_name(values: dict[str, object], named: str) -> None:
    own = {"remote_vllm": "http://127.0.0.1:8000", "max_num_seqs": 8, "max_model_len": 64, "num_threads": 2}
    own |= {"engines_on_host": 2, "place_on_host": 1}  # as the second engine of a mesh gets them
    assert EngineSettings.of(**own).remote_vllm == "http://127.0.0.1:8000"
    with pytest.raises(ValueError, match=f"^--remote-vllm: .* leave out {named}"):
        EngineSettings.of(**own, **values)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://me:key@host", "http://host/?a=1"]
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be http://host:port or https://host:port"):
        EngineSettings.of(remote_vllm=url)


def test_a_key_file_without_a_server_is_refused() -> None:
    with pytest.raises(ValueError, match="of no use without --remote-vllm"):
        EngineSettings.of(remote_vllm_key_file="/tmp/key")


@pytest.mark.parametrize(
    ("version", "has_node", "expected"),
    [
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", True, True),
        ("cuda: Optional[str] = '12.6'\n", False, False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True, False),
    ],
)
def test_a_gpu_needs_a_device_and_a_torch_for_it(
    version: str, has_node: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(
        engine_settings, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    monkeypatch.setattr(engine_settings, "_GPU_NODES", (str(tmp_path / ("nvidia*" if has_node else "none*")),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_settings.may_have_gpu() is expected
    for hidden in ("", " ", "-1", "none", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert engine_settings.may_have_gpu() is False
    for shown in ("1", "0,1", "GPU-1f", "MIG-1f"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert engine_settings.may_have_gpu() is expected


@pytest.mark.parametrize(
    ("worker", "has_gpu", "expected"),
    [
        (WorkerConfig(device="auto"), True, True),
        (WorkerConfig(device="auto"), False, False),
        (WorkerConfig(device="cuda"), False, True),
        (WorkerConfig(device="cpu"), True, False),
        (WorkerConfig(worker="hash"), True, False),
    ],
)
def test_steps_overlap_by_default_where_a_gpu_computes(
    worker: WorkerConfig, has_gpu: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_settings, "may_have_gpu", lambda: has_gpu)
    found = for_checkpoint(EngineConfig(worker=worker), "").scheduler
    assert (found.async_scheduling, found.overlaps_by_default) == (expected, expected)
    for chosen in (True, False):
        found = for_checkpoint(
            EngineConfig(worker=worker, scheduler=SchedulerConfig(async_scheduling=chosen)), ""
        ).scheduler
        assert (found.async_scheduling, found.overlaps_by_default) == (chosen, False)


@pytest.mark.parametrize("option", ["data_parallel_backend", "distributed_executor_backend"])
def test_steps_overlap_by_default_where_ray_finds_the_gpus(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "may_have_gpu", lambda: False)
    for device, expected in (("auto", True), ("cuda", True), ("cpu", False)):
        config = EngineConfig(worker=WorkerConfig(device=device), parallel=replace(ParallelConfig(), **{option: "ray"}))
        assert for_checkpoint(config, "").scheduler.async_scheduling is expected


def test_requests_move_only_between_engines_that_exchange_kv() -> None:
    missing: tuple[tuple[dict[str, Any], str], ...]
    missing = (({}, "--kv-transports"), ({"kv_transports": ("shm",), "kv_listen": ""}, "--kv-listen"))
    for values, option in missing:
        with pytest.raises(ValueError, match=f"--move-before-preemption: .* set {option}$"):
            EngineSettings.of(listen="127.0.0.1:0", move_before_preemption=True, **values)
    for values in ({"kv_transports": ("shm",)}, {"role": "decode"}):
        assert EngineSettings.of(listen="127.0.0.1:0", move_before_preemption=True, **values).move_before_preemption


def test_a_prefill_engine_has_an_address_for_its_kv() -> None:
    """The coordinator would refuse all of its reports but the first."""
    with pytest.raises(ValueError, match="--kv-listen: "):
        EngineSettings.of(listen="127.0.0.1:0", role="prefill", kv_listen="")


LARGER, SMALLER = (256, 8192), (128, 2048)


@pytest.mark.parametrize(
    ("given", "has_gpu", "expected"),
    [
        ({}, True, LARGER),
        ({"device": "cuda"}, False, LARGER),
        ({}, False, SMALLER),
        ({"device": "cpu"}, True, SMALLER),
        ({"worker": "hash"}, True, SMALLER),
        ({"max_num_seqs": 128, "max_num_batched_tokens": 2048}, True, SMALLER),
        ({"max_num_seqs": 300}, True, (300, 8192)),
        ({"max_num_batched_tokens": 2048}, True, (256, 2048)),
        ({"max_num_batched_tokens": 2047}, True, (128, 2047)),
        ({"remote_vllm": "http://127.0.0.1:1"}, True, SMALLER),
    ],
)
def test_steps_are_larger_by_default_where_a_gpu_computes(
    given: dict[str, object], has_gpu: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_settings, "may_have_gpu", lambda: has_gpu)
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    for settings in (EngineSettings.of(**given), EngineSettings.read(flags, {})):
        scheduler = settings.engine.scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == expected
        assert scheduler.prefill_tokens_beside_decode == 128
