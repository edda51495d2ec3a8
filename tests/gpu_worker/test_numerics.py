"""The numerics of an engine name how its processor rounds the inputs of quantized layers."""

import pytest

from tokenloom.gpu_worker import numerics as rounding
from tokenloom.gpu_worker.attention.attention_backend import TOKENWISE
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.request import request_records
from tokenloom.request.request_records import repeats_exactly


def refuse():
    raise KernelsUnavailable("none")


@pytest.mark.parametrize(
    ("has_amx", "has_avx2", "name"),
    [(True, True, "by-row"), (False, True, "by-group"), (False, False, "no-kernels")],
)
def test_processors_that_round_differently_have_different_names(has_amx, has_avx2, name, monkeypatch):
    monkeypatch.setattr(rounding, "load_int8", object if has_amx else refuse)
    monkeypatch.setattr(rounding, "load_quantized", object if has_avx2 else refuse)
    assert rounding.input_rounding() == name
    assert not repeats_exactly(f"cpu/float32/int4/{name}", "HND/fp32/4x2x64/16")


def test_batch_invariant_engines_have_the_name_that_records_look_for():
    assert TOKENWISE == request_records.TOKENWISE
