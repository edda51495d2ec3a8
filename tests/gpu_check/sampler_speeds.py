"""How long drawing takes, and what rows that ask for more add to a step; a part of the section of speeds."""

import torch

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import Target
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels, draw


def run(rows: Rows, target: Target) -> None:
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)):
        _draw(rows, target, top_k, top_p)
    for divides in (False, True):
        _draw(rows, target, 50, 0.9, 1, divides=divides)
    for count in target.pick((1, 128), (1, 2)):
        _asking_rows(rows, target, count)


def _logits(target: Target) -> torch.Tensor:
    return target.random(*target.pick((128, 151_936), (2, 1000)), dtype=torch.float32) * 3


def _draw(rows: Rows, target: Target, top_k: int, top_p: float, most_rows: int = 128, *, divides: bool = False) -> None:
    logits = _logits(target)[:most_rows]
    count, vocab = logits.shape
    every = [logits, *(logits.clone() for _ in range(target.turns(logits.nbytes) - 1))]
    ones = torch.ones(count, device=target.device, dtype=torch.float64)
    columns = (ones, ones * top_p, ones * 0, torch.rand(count, device=target.device, dtype=torch.float64))
    top_ks = torch.full((count,), top_k, device=target.device, dtype=torch.int32)
    asked = (*columns, top_ks, torch.arange(count, device=target.device))
    turns = target.pick(2, 1)
    ms = target.graph_ms(lambda: [draw(each, asked, divides=divides) for each in every], turns) / len(every)
    name = f"sampler, {count} x {vocab:,}, top-k {top_k}, top-p {top_p}"
    rows.add(f"{name}, by parts" if divides else name, ms=ms)


def _asking_rows(rows: Rows, target: Target, count: int) -> None:
    """What penalties and log probabilities of so many rows add to a step of all."""
    logits, kernels, device = _logits(target), TritonSamplerKernels(), target.device
    num_rows, vocab = logits.shape
    ints, doubles = torch.arange(count, device=device, dtype=torch.int32), torch.ones(count, device=device).double()
    none = torch.full((count,), -1, device=device, dtype=torch.int32)
    starts, listed = torch.zeros(count + 1, device=device, dtype=torch.int32), ints[:0]
    masks = torch.empty(0, -(-vocab // 32), device=device, dtype=torch.int32)
    seen = torch.zeros(count, vocab, device=device, dtype=torch.int32)
    penalties = (doubles, doubles * 0, doubles * 0)  # which leave the logits as they are
    edits = [ints, starts, listed, listed.float(), none, masks, ints, *penalties, none]
    us = target.graph_ms(lambda: kernels.change(logits, edits, seen), target.pick(4, 1)) * 1e3
    rows.add(f"penalties, {count} of {num_rows} rows", us=us)
    tokens, own = torch.zeros(count, device=device, dtype=torch.int64), logits[:count]
    wanted = [torch.full_like(ints, 20), starts, listed]
    us = target.graph_ms(lambda: kernels.find_logprobs(own, wanted, tokens, 20), target.pick(4, 1)) * 1e3
    rows.add(f"20 log probabilities, {count} rows", us=us)
