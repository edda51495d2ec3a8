"""Takes the place of the sampler's kernels: the host's rules, with the arrays that the kernels would get."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.device.device_sampler import NO_CHOICE, SEEN, DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampling_arrays import FoundLogprobs
from tokenloom.gpu_worker.sampler.host.sampler import NO_TOKEN, allowed_set, first_past


class HostKernels:
    """Fulfils ``cuda.sampler.SamplerKernels`` on tensors of the CPU."""

    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        temperatures, top_ps, min_ps, numbers, top_ks, asking = columns
        asked = [each[asking] for each in (temperatures, top_ps, min_ps)]
        rows = zip(logits.numpy(), *asked, numbers, top_ks[asking], strict=True)
        return torch.tensor([_draw(row, *each) for row, *each in rows])

    def change(self, logits: Tensor, edits: Sequence[Tensor], seen: Tensor) -> None:
        rows, starts, token_ids, values, *columns = (each.numpy() for each in edits)
        mask_of, masks, *others = columns
        for edit, row in enumerate(rows):
            mask = masks[mask_of[edit]] if mask_of[edit] >= 0 else None
            listed = slice(starts[edit], starts[edit + 1])
            of_edit = (token_ids[listed], values[listed], mask, seen.numpy(), *(each[edit] for each in others))
            _change(logits.numpy()[row], *of_edit)

    def count(self, seen: Tensor, edits: Sequence[Tensor], drawn: Tensor) -> None:
        for row, slot in zip(edits[0].tolist(), edits[6].tolist(), strict=True):
            if slot >= 0:
                token_id = max(0, int(drawn[row]))
                seen[slot, token_id] = (int(seen[slot, token_id]) | SEEN) + 1

    def find_logprobs(
        self, logits: Tensor, wanted: Sequence[Tensor], token_ids: Tensor, most_listed: int
    ) -> FoundLogprobs:
        num_tops, starts, also = (each.numpy() for each in wanted)
        shape = (len(logits), 1 + most_listed)
        ids, values = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        ranks, normalizers = np.zeros(len(logits), dtype=np.int32), np.zeros(len(logits))
        for row, each in enumerate(logits.numpy()):
            order = np.argsort(-each, kind="stable")
            token_id = max(0, int(token_ids[row]))
            named = also[starts[row] : starts[row + 1]]
            listed = [token_id, *sorted(order[: num_tops[row]]), *named]
            ids[row, : len(listed)], values[row, : len(listed)] = listed, each[listed]
            better = (each > each[token_id]) | ((each == each[token_id]) & (np.arange(len(each)) < token_id))
            ranks[row] = 1 + np.count_nonzero(better)
            peak = np.float64(each.max())
            is_finite = np.isfinite(peak)
            normalizers[row] = peak + np.log(np.exp(each - peak).sum()) if is_finite else np.nan
        return FoundLogprobs(*(torch.from_numpy(array) for array in (ids, values, ranks, normalizers)))


def make_device_sampler() -> DeviceSampler:
    return DeviceSampler(HostKernels())


def _draw(logits, temperature, top_p, min_p, number, top_k) -> int:
    best = int(logits.argmax())
    if not np.isfinite(logits).any():
        return NO_CHOICE if np.isneginf(logits).all() else NO_TOKEN
    if not np.isfinite(logits[best]) or not temperature:
        return best
    wanted = CoreSamplingParams(
        max_tokens=1, seed=0, temperature=float(temperature), top_p=float(top_p), min_p=float(min_p), top_k=int(top_k)
    )
    token_ids, weights = allowed_set(logits, wanted)
    index = first_past(weights, float(number))
    return index if token_ids is None else int(token_ids[index])


def _change(row, token_ids, values, mask, seen, slot, repetition, presence, frequency, forced) -> None:
    row[token_ids] = np.where(np.isneginf(values), values, row[token_ids] + values)
    if mask is not None:
        row[~np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(row)).astype(bool)] = -np.inf
    if slot >= 0:
        token_ids = np.flatnonzero(seen[slot])
        counts = seen[slot, token_ids] & (SEEN - 1)
        exact = row[token_ids].astype(np.float64)
        exact = np.where(exact > 0, exact / repetition, exact * repetition)
        row[token_ids] = exact - (frequency * counts + presence * (counts > 0))
    if forced >= 0:
        row[:] = -np.inf
        row[forced] = 0.0
