"""Finds what a request names as its model: the model of a mesh, or one of its LoRA adapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenloom.request import errors
from tokenloom.v1 import types_pb2

MAX_QUOTED = 128
LISTING = "GET /v1/models (gRPC: ListModels) lists"
"""Where a client finds the names of models and adapters."""
"""Limits the characters of a client's name that an error repeats."""
LATEST = ":latest"
"""Ends names of Ollama's clients, where it says nothing; an adapter of this name comes first."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """Holds what a request has of its LoRA adapter.

    Attributes:
        name: ``model:adapter``, for answers, logs and metrics.
        digest: Identifies the adapter in the mesh.
    """

    name: str
    digest: bytes


class KnownAdapters(Protocol):
    """Knows the adapters that are loaded."""

    @property
    def adapters(self) -> Mapping[str, types_pb2.Adapter]:
        """The adapters by name."""


class ModelNames:
    """Holds the names of one mesh's model, and finds those of its adapters, which change while the mesh runs.

    An adapter is named ``model:adapter`` or, as in vLLM, by its own name, unless a model has this name.

    Attributes:
        own: The names of the model; the first one stands in answers and metrics.
    """

    def __init__(self, own: Sequence[str], mesh: KnownAdapters) -> None:
        self.own = tuple(own)
        self._mesh = mesh

    def find(self, name: object) -> NamedAdapter | None:
        """Return the adapter that a request names; None for the model itself, which no name means too.

        Raises ``ModelNotFound`` for what is not served, ``InvalidArgument`` for what is no name.
        """
        if name is None or name in self.own:
            return None
        if not isinstance(name, str):
            raise errors.InvalidArgument("model must be a string", "model")
        model, _, adapter = name.rpartition(":")
        if (found := self._mesh.adapters.get(adapter if model in self.own else name)) is not None:
            return NamedAdapter(f"{self.own[0]}:{found.name}", found.digest)
        if name.endswith(LATEST):
            return self.find(name.removesuffix(LATEST))
        raise self.not_served(name)

    def not_served(self, name: str) -> errors.ModelNotFound:
        """Return the error of a request that names what the mesh does not have."""
        reason = f"model {name[:MAX_QUOTED]!r} is not served"
        model, _, adapter = name.rpartition(":")
        if model in self.own:
            reason = f"model {model!r} has no LoRA adapter {adapter[:MAX_QUOTED]!r}"
        return errors.ModelNotFound(f"{reason}; {LISTING} the served models", field="model")

    def has(self, name: str) -> bool:
        """Return whether a name is that of the model or of one of its adapters."""
        try:
            self.find(name)
        except errors.ModelNotFound:
            return False
        return True

    def answers_as(self, name: object) -> str:
        """Return the name that stands in answers to requests that name ``name``. Raises as :meth:`find`."""
        found = self.find(name)
        return self.own[0] if found is None else found.name

    def adapters(self) -> Iterator[str]:
        """Yield the names of the adapters that are loaded, in order, each after ``model:`` and alone."""
        for name in sorted(self._mesh.adapters):
            yield f"{self.own[0]}:{name}"
            yield name
