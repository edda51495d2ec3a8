"""Keeps the rows of the batch on the device: a step sends only what changed in them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch.input_batch import InputBatch
from ..sampler.device.sampling_arrays import SamplingRows
from ..sampler.host.sampler import Purpose, uniform
from .step_tensors import RowKernels

Ints = npt.NDArray[np.int64]


class DeviceRows:
    """Holds block tables, sampling parameters and the last drawn token of every row of a batch.

    The number of a request's tokens changes in every step; it is sent with the step.
    """

    def __init__(self, batch: InputBatch, kernels: RowKernels, device: torch.device) -> None:
        self._batch = batch
        self._kernels = kernels
        self._changes = batch.watch()
        count = batch.max_num_seqs
        self.tables = torch.zeros(batch.block_table.block_ids.shape, dtype=torch.int32, device=device)
        """[rows, blocks * groups]"""
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=device)
        """[rows]: the token that each drew last."""
        self._params = torch.zeros((3, count), dtype=torch.float64, device=device)  # temperature, top-p, min-p
        self._top_ks = torch.zeros(count, dtype=torch.int32, device=device)
        self._seeds = np.zeros(count, dtype=np.uint64)

    def changes(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that bring the copies up to date, by name; :meth:`apply` gets them on the device."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        places, block_ids = self._changes.take_blocks()
        if len(places):
            arrays |= {"changed places": places, "changed blocks": block_ids}
        rows = [row for row in self._changes.take_rows() if self._batch.has_row(row)]
        if rows:
            params = [self._batch.params_of(row) for row in rows]
            self._seeds[rows] = [each.seed for each in params]
            at = np.array(rows, dtype=np.int64)
            values = [(each.temperature, each.top_p, each.min_p) for each in params]
            arrays["new rows"] = at
            arrays["new places"] = (at + len(self._seeds) * np.arange(3)[:, None]).reshape(-1)
            arrays["new params"] = np.array(values, dtype=np.float64).T.reshape(-1)
            arrays["new top ks"] = np.array([max(0, each.top_k) for each in params], dtype=np.int32)
        return arrays

    def apply(self, sent: Mapping[str, Tensor]) -> None:
        """Write the changes that were sent."""
        if "changed places" in sent:
            self._kernels.scatter(self.tables, sent["changed places"], sent["changed blocks"])
        if "new rows" in sent:
            self._kernels.scatter(self._params, sent["new places"], sent["new params"])
            self._kernels.scatter(self._top_ks, sent["new rows"], sent["new top ks"])

    def numbers(self, rows: Ints) -> npt.NDArray[np.float64]:
        """Return the uniform numbers [S] of the next draws of these rows, by the rule of the host's sampler."""
        indices = self._batch.output_indices(rows).astype(np.uint64)
        return uniform(self._seeds[rows], indices, Purpose.SAMPLE)

    def draws(self, rows: Tensor, numbers: Tensor) -> SamplingRows:
        """Return what these rows [S] ask for in a step, with the ``numbers`` [S] of their draws."""
        params = self._params.index_select(1, rows)
        columns = (params[0], params[1], params[2], numbers, self._top_ks.index_select(0, rows))
        return SamplingRows(columns, rows, self.last_tokens)
