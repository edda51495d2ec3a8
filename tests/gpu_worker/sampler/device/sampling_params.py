"""Sampling parameters of any request, for hypothesis."""

from typing import Any

from hypothesis import strategies as st

from tests.gpu_worker.sampler.device.sampling_steps import VOCAB


def token_ids(**sizes: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCAB - 1), unique=True, **sizes)


PARAMS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0])},
    optional={
        "top_k": st.integers(1, 20),
        "top_p": st.floats(0.2, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "repetition_penalty": st.floats(0.25, 4.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=8),
        "bad_words": st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "allowed_token_ids": token_ids(min_size=1, max_size=40).map(tuple),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": token_ids(max_size=60).map(tuple),
        "logprobs": st.integers(0, 5),
        "logprob_token_ids": token_ids(max_size=3).map(tuple),
    },
)
"""The sampling parameters of one request."""
