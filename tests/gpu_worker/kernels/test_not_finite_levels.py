"""Kernels of all levels of processors keep NaN and infinities; ``test_not_finite.py`` has those of this processor."""

import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.gpu_worker.kernels import not_finite
from tests.gpu_worker.kernels.not_finite import DTYPES, LAYERS, VALUES
from tests.gpu_worker.kernels.own_builds import builder, use_builds
from tokenloom.gpu_worker.kernels.levels import available_levels

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True, params=available_levels(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_builds(patch, builder(tmp_path_factory.mktemp("kernels"), ["-O1", *request.param.flags]))
        yield


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_fused_operations(dtype: torch.dtype, value: float) -> None:
    for name in LAYERS:
        for num_rows in (1, 40):
            not_finite.check_product(name, dtype, value, num_rows)
    not_finite.check_fused(dtype, value)
    not_finite.check_lora(dtype, value)


@pytest.mark.parametrize(("where", "value", "dtype", "rule"), not_finite.ATTENTION)
def test_attention(dtype: torch.dtype, value: float, where: str, rule: not_finite.Rule) -> None:
    not_finite.check_attention(dtype, value, None, where, rule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_sees_only_an_infinite_score(dtype: torch.dtype) -> None:
    not_finite.check_lone_infinity(dtype)


@pytest.mark.parametrize("value", VALUES)
def test_attention_over_8_bits(value: float) -> None:
    for where in ("query", "key", "value"):
        not_finite.check_attention(torch.bfloat16, value, torch.int8, where, not_finite.plain_rule)
