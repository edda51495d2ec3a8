"""Computes logits with the head of a transformers model, so that its scaling and caps are kept."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from .modules import LinearModule


class _Output(BaseModelOutputWithPast):
    """Holds the last hidden states; every other field of a model's output is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _GivenBody(nn.Module):
    """Replaces the inner part of a model: returns the hidden states that it was given, and computes nothing."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.__dict__["hidden"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.__dict__["hidden"])


class Head:
    """Computes what a causal model does after its inner part."""

    def __init__(self, model: Any, body_name: str, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._body = _GivenBody(model._modules[body_name])
        self._shell = copy.copy(model)
        self._shell.__dict__["_modules"] = {**model._modules, body_name: self._body}
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._plain: LinearModule | None = None
        output = model.get_output_embeddings()
        if isinstance(output, LinearModule):
            x = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
            if torch.equal(output(x).float(), self._through_model(x)):
                self._plain = output

    def __call__(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden_size] into float32 logits [R, vocab_size]."""
        return self._plain(hidden).float() if self._plain is not None else self._through_model(hidden)

    def _through_model(self, hidden: Tensor) -> Tensor:
        self._body.__dict__["hidden"] = hidden[None]
        logits: Tensor = self._shell(input_ids=self._ids.expand(1, len(hidden)), use_cache=False).logits[0]
        self._body.__dict__["hidden"] = None
        return logits.float()
