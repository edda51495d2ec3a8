"""How long a request may be on an engine."""

import pytest

from tokenloom.services.runtime.placement.pool import longest_request
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import Fingerprint, ModelLimits


@pytest.mark.parametrize(
    ("num_blocks", "limit", "longest"), [(10, 0, 160), (10, 100, 100), (10, 1000, 160), (0, 512, 512)]
)
def test_cache_and_limit_bound_a_request(num_blocks: int, limit: int, longest: int) -> None:
    engine = EngineIdentity(
        num_kv_blocks=num_blocks, fingerprint=Fingerprint(block_size=16), limits=ModelLimits(max_model_len=limit)
    )
    assert longest_request(engine) == longest
