"""How many calls a decode step of a large model gives a GPU, and that one copy goes to it and one comes back."""

import pytest

from tests.gpu_worker.cuda.device_calls import MODELS, count_step

MOST = {
    ("8B (Llama 3.1)", 1): 210,
    ("8B (Llama 3.1)", 16): 210,
    ("8B (Llama 3.1)", 128): 298,
    ("30B-A3B (Qwen3)", 1): 740,
    ("30B-A3B (Qwen3)", 128): 740,
}


@pytest.mark.parametrize(("name", "num_rows"), MOST)
def test_calls_of_a_decode_step(name, num_rows):
    calls = count_step(MODELS[name], num_rows)
    assert calls.kernels["attend"] == MODELS[name]["num_hidden_layers"]
    assert calls.total <= MOST[name, num_rows], (calls.kernels, calls.operations)
    assert (calls.to_device, calls.to_host, calls.blocking) == (1, 1, 0)


def test_experts_take_at_most_14_calls_of_a_layer():
    calls = count_step(MODELS["30B-A3B (Qwen3)"], 16)
    kernels, layers = calls.kernels, 48
    experts = {name: kernels[name] for name in ("route", "rank_rows", "place_rows", "grouped_product", "mix_places")}
    assert experts == {"route": 48, "rank_rows": 48, "place_rows": 48, "grouped_product": 96, "mix_places": 48}
    assert calls.operations["zeros"] + calls.operations["zero_"] == layers
    assert sum(experts.values()) + 2 * layers <= 14 * layers  # with the router's product and the sizes that begin at 0
