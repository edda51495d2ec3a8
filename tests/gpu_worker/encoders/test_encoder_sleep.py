"""An encoder asleep: it pools nothing, and awake it pools the same, or what other weights give."""

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.gpu_worker.pooling.small_models import PROMPTS, make_checkpoint, make_config
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams, PoolingTask
from tokenloom.engine_core.data.errors import EnginePausedError, UtilityError
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker

LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
"""With these sizes the weights have 19 MB in fp32."""


def make_client(path: Path) -> InprocClient:
    config = make_config(path)
    return InprocClient(config, UniProcExecutor(make_worker(config)))


def embed(client: InprocClient) -> np.ndarray:
    """Return the vectors of the prompts, [3, hidden_size]."""
    for index, prompt in enumerate(PROMPTS):
        pooling = CorePoolingParams(PoolingTask.EMBED)
        client.add_request(EngineCoreRequest(str(index), prompt, DRAWS_NOTHING, pooling_params=pooling))
    vectors: dict[str, object] = {}
    while len(vectors) < len(PROMPTS):
        for output in client.get_output().outputs:
            assert not output.error
            vectors[output.request_id] = output.pooled
    return np.array([vectors[str(index)] for index in range(len(PROMPTS))])


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_asleep_the_memory_is_returned_and_awake_the_vectors_are_the_same(
    tmp_path: Path, name: str, level: int
) -> None:
    make_checkpoint(tmp_path, name, **LARGE)
    client = make_client(tmp_path)
    expected = embed(client)
    freed = client.call_utility("sleep", level)
    assert isinstance(freed, dict)
    assert freed["weights"] >= 0.8 * (tmp_path / "model.safetensors").stat().st_size
    assert client.call_utility("is_sleeping") is True
    client.add_request(
        EngineCoreRequest("early", PROMPTS[0], DRAWS_NOTHING, pooling_params=CorePoolingParams(PoolingTask.EMBED))
    )
    with pytest.raises(EnginePausedError, match=r"call reload_weights|call wake_up"):
        client.get_output()
    if level == 2:
        with pytest.raises(UtilityError, match="dropped for good; call reload_weights"):
            client.call_utility("wake_up")
        client.call_utility("reload_weights", str(tmp_path))
    client.call_utility("wake_up")
    assert client.call_utility("is_sleeping") is False
    assert np.array_equal(embed(client), expected)
    client.close()


def test_weights_that_changed_meanwhile_are_refused_until_they_are_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "BertModel")
    make_checkpoint(tmp_path / "other", "BertModel", initializer_range=0.5)
    client = make_client(tmp_path / "one")
    before = embed(client)
    client.call_utility("sleep")
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    with pytest.raises(UtilityError, match="changed after they were loaded"):
        client.call_utility("wake_up")
    client.call_utility("reload_weights", str(tmp_path / "one"))
    client.call_utility("wake_up")
    assert not np.allclose(embed(client), before)
    client.close()


def test_a_checkpoint_of_another_shape_is_refused_and_the_weights_stay(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "BertModel")
    make_checkpoint(tmp_path / "other", "BertModel", num_hidden_layers=2)
    client = make_client(tmp_path / "one")
    before = embed(client)
    with pytest.raises(UtilityError, match="not the same model"):
        client.call_utility("reload_weights", str(tmp_path / "other"))
    assert np.array_equal(embed(client), before)
    client.close()


def test_an_encoder_with_adapters_does_not_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "BertModel")
    config = replace(make_config(tmp_path), lora=LoraConfig(enable=True))
    with pytest.raises(ValueError, match="enable_lora: no layer of this model can have an adapter"):
        make_worker(config).load_model()
