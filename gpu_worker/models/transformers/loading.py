"""Finds the class of transformers that computes a checkpoint, without running code of the checkpoint, and loads the
checkpoint into its modules."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenloom.gguf.gguf_file import is_gguf

from ...checkpoint.directory_source import DirectorySource
from ...checkpoint.files.config_reader import is_pickled, lacks_index, read_wrapper, weight_files
from ...checkpoint.gguf.config import described_by, read_model
from ...checkpoint.gguf.source import GgufSource
from ...checkpoint.quantization.entries import Scheme, scheme_for_modules
from ...checkpoint.weights import WeightSource
from ...ops.ops import Ops
from .modules import replace_modules
from .stored_weights import read_state, unpack_rest


class CausalClass(NamedTuple):
    """Names what computes a checkpoint."""

    model: Any
    """The class, a ``PreTrainedModel`` with a language model's head."""
    config: Any
    """The checkpoint's ``PreTrainedConfig``."""
    architecture: str
    scheme: Scheme | None = None
    """How the checkpoint stores quantized weights."""


def find_causal_class(path: Path) -> CausalClass:
    """Return the class that the ``config.json`` in ``path`` names.

    Raises ``ValueError`` if transformers has no causal language model of that name.
    """
    name, values = read_model(path)
    model = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model, type) or not issubclass(model, transformers.PreTrainedModel):
        raise unknown_class(path, name, values)
    config = read_config(path, values if is_gguf(path) or read_wrapper(path) is not None else None)
    vars(config).pop("quantization_config", None)  # transformers' own readers are not used
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"{described_by(path)}: architectures names {name}, which is not a causal language model: use a "
            "checkpoint whose entry ends in ForCausalLM"
        )
    return CausalClass(model, config, name, scheme_for_modules(path))


def read_config(path: Path, entries: dict[str, Any] | None = None) -> Any:
    """Return the ``PreTrainedConfig`` of a checkpoint directory, or of these ``entries`` of a checkpoint. Raises
    ``ValueError``."""
    try:
        if entries is not None:
            return transformers.AutoConfig.for_model(**entries)
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its checks raise errors of many kinds
        raise ValueError(f"{described_by(path)}: transformers cannot read it: {_first_line(error)}") from error


def unknown_class(path: Path, name: str, values: dict[str, Any]) -> ValueError:
    """Return the error for a class that transformers does not have."""
    file = described_by(path)
    if values.get("auto_map"):
        return ValueError(
            f"{file}: architectures names {name}, whose code is in the checkpoint (auto_map); code of checkpoints is "
            "never run: use a model whose class is part of transformers, see docs/reference/models.md"
        )
    return ValueError(
        f"{file}: architectures names {name}, which neither Tokenloom nor transformers {transformers.__version__} has: "
        "use a model of docs/reference/models.md, or a newer transformers if it has that class"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


_LOADING = threading.Lock()
"""Held while transformers loads. It replaces methods of its classes meanwhile and puts them back from a variable of the
load: two loads at the same time would leave weights untied for the rest of the process."""


def load_modules(
    found: CausalClass,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    quantization: str | None,
    divide: Callable[[Any], None] | None = None,
) -> Any:
    """Load the model of ``path`` and replace its layers by ours, one after the other. ``divide`` leaves a rank's part
    of the model; None: it computes the whole.

    Raises ``ValueError`` if tensors are missing, left over or of another shape.
    """
    pickled = not is_gguf(path) and is_pickled(weight_files(path)[0])  # raises ValueError for other formats
    with ExitStack() as opened:
        state = None
        if found.scheme is not None or is_gguf(path) or divide is not None:
            # Views of the mapped files, of which a rank reads its part.
            source = opened.enter_context(closing(_source(path, found.scheme)))
            with torch.inference_mode(False):
                state = read_state(source, dtype)
        try:
            # Stand-ins of weights cannot be tensors of inference mode, in which transformers makes parameters of them.
            with torch.inference_mode(torch.is_inference_mode_enabled() and state is None), torch.no_grad():
                model, report = load_quietly(found, path, dtype, use_safetensors=not pickled, state=state)
        except Exception as error:  # classes check their configurations in many ways
            raise ValueError(
                f"{described_by(path)}: transformers cannot load {found.architecture}: {type(error).__name__}: {error}"
            ) from error
        refuse_differences(report)
        with torch.inference_mode():
            if device.type != "cpu":  # where layers keep no weights as they are stored
                unpack_rest(model)
            if divide is not None:
                divide(model)
            model = model.to(device).eval().requires_grad_(False)
            replace_modules(model, model.get_output_embeddings(), ops, quantization)
            unpack_rest(model)
    return model


@contextmanager
def quietly() -> Iterator[None]:
    """Load without the library's progress bars, reports and warnings, which are for those who train models."""
    shows_progress, verbosity = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if shows_progress:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_quietly(
    found: CausalClass,
    path: Path,
    dtype: torch.dtype,
    *,
    use_safetensors: bool,
    attention: str | None = "eager",
    state: dict[str, Tensor] | None = None,
) -> tuple[Any, Any]:
    """Return the model with transformers' own attention, and the differences between its tensors and the files'.

    ``attention``: which one; None: the class's default. ``state``: the tensors; None: those of the files of ``path``.
    """
    with quietly(), ExitStack() as opened, _LOADING:
        if state is None and (lacks_index(path) or read_wrapper(path) is not None):
            state = read_state(opened.enter_context(closing(_source(path))), dtype)
        loaded: tuple[Any, Any] = found.model.from_pretrained(
            path if state is None else None,
            config=found.config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attention,
            # The class is that of the installed library: code that comes with a checkpoint is never run.
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=use_safetensors,
            output_loading_info=True,
        )
    return loaded


def _source(path: Path, scheme: Scheme | None = None) -> WeightSource:
    if is_gguf(path):
        return GgufSource(path)
    # Qwen3-VL stores the experts of a layer as one tensor, and transformers' class of its text reads one by one.
    splits_experts = read_wrapper(path) is not None and read_model(path)[0] == "Qwen3MoeForCausalLM"
    return DirectorySource(path, scheme, splits_experts=splits_experts)


def make_on_meta(found: CausalClass, dtype: torch.dtype) -> Any:
    """Return the model without memory for its tensors. Raises ``ValueError`` if its configuration is impossible."""
    try:
        with _LOADING, torch.device("meta"):
            return found.model._from_config(found.config, dtype=dtype, attn_implementation="eager")
    except KeyError as error:  # an activation function, say, that the library lacks
        raise ValueError(f"transformers cannot make {found.architecture}: it has no {error}") from error


def refuse_differences(report: Any) -> None:
    """Raise ``ValueError`` naming the tensors that the checkpoint lacks, or that the model did not read."""
    for kind, text in (
        ("missing_keys", "the checkpoint has no tensor {}, which its config.json asks for"),
        ("mismatched_keys", "the checkpoint's tensor {} has another shape than its config.json asks for"),
        ("unexpected_keys", "the checkpoint holds tensors of an unsupported feature: {}"),
    ):
        names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report[kind])
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(text.format(", ".join(names[:3]) + more))
