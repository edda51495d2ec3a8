"""Describes the served models as Ollama's API does."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenloom.request import errors
from tokenloom.v1 import coordinator_pb2
from tokenloom.v1.types_pb2 import MediaKind

from ..assistant.message_plans import MessagePlans
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes

VERSION = "0.12.6"
"""The version of Ollama whose API is spoken. Clients refuse servers older than what they need."""
_NEVER = "2999-12-31T00:00:00Z"
"""When a model leaves the memory."""
_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """Describes the models of all meshes, and their adapters.

    Attributes:
        began: When the gateway started, as RFC 3339 writes it: the models are as old for its clients.
    """

    meshes: ServedMeshes
    began: str

    def listed(self) -> dict[str, Any]:
        """Return the answer of ``/api/tags``."""
        return {"models": [self._entry(name) | {"modified_at": self.began} for name in self.meshes.listed()]}

    def running(self) -> dict[str, Any]:
        """Return the answer of ``/api/ps``."""
        return {"models": list(self._running())}

    def _running(self) -> Iterator[dict[str, Any]]:
        for mesh in self.meshes:
            if (identity := _identity(mesh)) is None:
                continue
            is_on_gpu = not identity.fingerprint.numerics.startswith("cpu")
            yield self._entry(mesh.model) | {
                "expires_at": _NEVER,
                "size_vram": identity.weight_bytes if is_on_gpu else 0,
                "context_length": identity.limits.max_model_len,
            }

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            mesh, adapter = self.meshes.find(name)
        except errors.Unavailable:
            return model_entry(name, None, b"")
        return model_entry(name, mesh, b"" if adapter is None else adapter.digest)


def model_entry(name: str, mesh: ServedMesh | None, adapter_digest: bytes) -> dict[str, Any]:
    """Return a model as lists have it. ``mesh``: that serves it; None: it is not connected."""
    identity = None if mesh is None else _identity(mesh)
    digest = adapter_digest or (b"" if identity is None else identity.fingerprint.weights)
    return {
        "name": name,
        "model": name,
        "size": 0 if identity is None else identity.weight_bytes,  # an adapter needs the whole model
        # Clients compare digests to learn whether a model has changed: one without weights has that of its name.
        "digest": digest.hex() or hashlib.sha256(name.encode()).hexdigest(),
        "details": details_of(identity),
    }


def show_model(mesh: ServedMesh, plans: MessagePlans, began: str) -> dict[str, Any]:
    """Return the answer of ``/api/show``."""
    limits = mesh.health.limits()
    does_generate = limits is None or not limits.HasField("generates") or limits.generates
    capabilities = ["completion"] if does_generate else ["embedding"]
    if does_generate:
        reads_images = limits is not None and MediaKind.MEDIA_KIND_IMAGE in limits.media_kinds
        has = {"vision": reads_images, "tools": plans.tools, "thinking": plans.reasoning}
        capabilities += [name for name, is_there in has.items() if is_there]
    tools = "{{ .Tools }}" if "tools" in capabilities else ""
    return {
        "modelfile": f"FROM {mesh.model}",
        "parameters": "",
        # Not the template itself, which is Jinja: clients search this text for the variables of Ollama's templates, and
        # find out by them whether the model takes tools.
        "template": f"{{{{ .System }}}}{tools}{{{{ .Prompt }}}}",
        "details": details_of(_identity(mesh)),
        "model_info": {
            "general.architecture": "tokenloom",
            "tokenloom.context_length": limits.max_model_len if limits else None,
            "tokenloom.vocab_size": limits.vocab_size if limits else None,
        },
        "capabilities": capabilities,
        "modified_at": began,
    }


def details_of(identity: coordinator_pb2.EngineIdentity | None) -> dict[str, Any]:
    """Return what lists say of a model's form. ``identity``: of an engine that serves it."""
    parts = () if identity is None else identity.fingerprint.numerics.split("/")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "tokenloom",
        "families": ["tokenloom"],
        "parameter_size": "",
        "quantization_level": next((_LEVELS[part] for part in parts if part in _LEVELS), ""),
    }


def _identity(mesh: ServedMesh) -> coordinator_pb2.EngineIdentity | None:
    """Return the identity of an engine that serves the model; None before the first one is known."""
    return next((entry.identity for entry in mesh.view.engines), None)
