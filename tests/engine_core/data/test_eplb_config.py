"""Options of the balancing of experts, as users write them."""

import msgspec
import pytest

from tokenloom.engine_core.data.config import EngineConfig, EplbConfig
from tokenloom.services.runtime.host.options import OptionError, build


def test_defaults_are_those_of_vllm() -> None:
    config = EplbConfig()
    assert (config.window_size, config.step_interval, config.num_redundant_experts) == (1000, 3000, 0)


def test_users_write_json() -> None:
    config = build(EngineConfig, {"enable_eplb": "true", "eplb_config": '{"step_interval": 10}'})
    assert config.parallel.enable_eplb
    assert config.parallel.eplb_config == EplbConfig(step_interval=10)
    assert msgspec.json.encode(config.parallel.eplb_config) == b'{"step_interval":10}'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"policy": "default"}', "unknown field `policy`"),
        ('{"use_async": true}', "unknown field `use_async`"),
        ('{"communicator": "torch_nccl"}', "unknown field `communicator`"),
        ('{"step_interval": 0}', "Expected `int` >= 1"),
    ],
)
def test_what_is_not_supported_is_named(text: str, error: str) -> None:
    with pytest.raises(OptionError, match=error):
        build(EngineConfig, {"eplb_config": text})
