"""Adapters that were trained with the head of a classifier."""

from pathlib import Path

import torch
import transformers

from tests.gpu_worker.lora.random_adapter import merge, save_adapter
from tests.gpu_worker.pooling.small_models import PROMPTS, logits, make_checkpoint, make_config
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams, PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.request.adapter_names import adapter_salt

LAYOUTS = {
    "trained": {"kinds": ("q_proj",), "modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"},
    "matrices": {"kinds": ("score", "v_proj")},
    "plain": {"kinds": ("o_proj",)},
}


def test_prompts_of_one_batch_have_heads_of_their_own(tmp_path: Path) -> None:
    base = tmp_path / "model"
    make_checkpoint(base, "Qwen3ForSequenceClassification", num_labels=3)
    adapters = {name: save_adapter(tmp_path / name, base, **entries) for name, entries in LAYOUTS.items()}
    config = make_config(base)
    lora = LoraConfig(enable=True, modules=tuple(f"{name}={path}" for name, path in adapters.items()))
    config = type(config)(worker=config.worker, cache=config.cache, scheduler=config.scheduler, lora=lora)
    core = EngineCore(config, UniProcExecutor(make_worker(config)))
    digests = {"": b""} | {state.name: state.digest for state in core.adapters.answer().adapters}  # type: ignore[union-attr]
    pooling = CorePoolingParams(PoolingTask.CLASSIFY, use_activation=False)
    for name, digest in digests.items():
        named = {"adapter": digest, "cache_salt": adapter_salt(b"", digest)}
        core.add_request(EngineCoreRequest(name, PROMPTS[0], DRAWS_NOTHING, pooling_params=pooling, **named))
    found = {}
    while core.has_work():
        found |= {output.request_id: output.pooled for output in core.step().outputs}
    for name in digests:
        path = base if not name else merge(base, adapters[name], tmp_path / f"merged_{name}")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        torch.testing.assert_close(torch.tensor(found[name]), logits(model, PROMPTS[0]), rtol=1e-4, atol=1e-4)
    assert len({tuple(each) for each in found.values()}) == 4
