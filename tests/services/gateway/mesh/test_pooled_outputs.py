"""The results of one pooling call come from one version of the weights."""

import pytest

from tokenloom.request.errors import WeightsReplaced
from tokenloom.services.gateway.mesh.pooled_outputs import PooledOutputs
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import Pooled


def outputs_of(*versions: str) -> PooledOutputs:
    outputs = PooledOutputs(len(versions), 1000, lambda: None, lambda _: None)
    outputs.num_live = len(versions)
    for index, version in enumerate(versions):
        outputs.put_pooled(index, Pooled(shape=[1], data=bytes(4)))
        outputs.finish(index, RequestFinished(weights_version=version))
    return outputs


@pytest.mark.parametrize("version", ["", "0123"])
async def test_the_version_of_all_results_is_told(version: str) -> None:
    outputs = outputs_of(version, version)
    await outputs.wait(0)
    assert (outputs.weights_version, outputs.results.count(None)) == (version, 0)


async def test_results_of_two_versions_are_no_answer() -> None:
    with pytest.raises(WeightsReplaced, match="send it again"):
        await outputs_of("0123", "4567").wait(0)
