"""The numerics of an engine name how its processor rounds the inputs of quantized layers, and where every bit counts
the processor's level."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenloom.gpu_worker import numerics as rounding
from tokenloom.gpu_worker.attention.attention_backend import TOKENWISE
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.levels import LEVELS
from tokenloom.gpu_worker.parallel.sharding import RankPlace
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


@pytest.mark.parametrize(("backend", "is_named"), [(TOKENWISE, True), ("cpu", False)])
def test_batch_invariant_engines_on_processors_that_add_differently_have_different_names(
    backend, is_named, monkeypatch
):
    config: Any = SimpleNamespace(scheme=None, quantization=None, dtype_name="bfloat16", rope_stretch=None, states=None)
    platform: Any = SimpleNamespace(device=torch.device("cpu"), hardware="")
    names = set()
    for level in LEVELS:
        monkeypatch.setattr(rounding, "available_levels", lambda level=level: [level, LEVELS[-1]])
        name = rounding.numerics_of(config, platform, backend, None, RankPlace())
        assert repeats_exactly(name, "") == is_named
        names.add(name)
    assert len(names) == (len(LEVELS) if is_named else 1)
    monkeypatch.setattr(rounding, "available_levels", list)  # of a system whose processors are not known
    assert rounding.numerics_of(config, platform, backend, None, RankPlace()).startswith(f"cpu/bfloat16/{backend}/")
