"""Reads what sentence-transformers keeps next to a checkpoint: its list of modules, and how texts become tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_FIRST = ("Transformer", "StaticEmbedding")
_LATER = ("Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
_NAMES = "config_sentence_transformers.json"
_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
LIMIT_FILES = _SETTINGS
"""The files that limit the tokens of a text."""
PROMPT_FILES = ("modules.json", "1_Pooling/config.json", _NAMES)
"""The files that say what stands before a text."""
_HARMLESS = frozenset(["attn_implementation", "dtype", "local_files_only", "token", "torch_dtype", "trust_remote_code"])
"""Arguments that change no vector: the engine chooses the dtype and how attention is computed."""
_NO_PROMPTS: dict[str, str] = {"query": "", "document": ""}
"""Prompts that every checkpoint has, as in sentence-transformers."""


# In the order in which sentence-transformers joins the vectors of several modes that older files switch on.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = tuple(_SWITCHES.values())
_ACTIVATIONS = (
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.Sigmoid",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.SiLU",
)
_VECTOR = "sentence_embedding"
"""What modules after the pooling read and write."""


class SentenceModule(NamedTuple):
    """Names a module, and where its files are."""

    type: str
    kind: str
    """The last part of the type."""
    directory: Path

    @property
    def where(self) -> str:
        """Return the name of its configuration, for errors."""
        return f"{self.directory.name}/config.json"

    @property
    def config(self) -> dict[str, Any]:
        return _read_object(self.directory / "config.json")

    @property
    def pooling_modes(self) -> tuple[str, ...]:
        """Return the modes of a Pooling module, whose vectors are joined. Raises ``ValueError`` naming another one."""
        chosen = self.config.get("pooling_mode")
        if chosen is None:
            chosen = [mode for switch, mode in _SWITCHES.items() if self.config.get(switch)] or ["mean"]
        names = tuple(map(str, chosen if isinstance(chosen, list) else [chosen]))
        if unknown := [name for name in names if name not in _MODES]:
            raise ValueError(f"{self.where}: pooling modes are {', '.join(_MODES)}, not {unknown[0]}")
        return names

    @property
    def activation(self) -> str:
        """Return the class of a Dense module's activation function. Raises ``ValueError`` for one not supported."""
        name = str(self.config.get("activation_function", _ACTIVATIONS[0]))
        if name not in _ACTIVATIONS:
            raise ValueError(f"{self.where}: the activation function {name} is not supported")
        return name

    def check(self) -> None:
        """Raise ``ValueError`` naming an entry that is not supported."""
        if self.kind == "Pooling":
            _ = self.pooling_modes
        if self.kind == "Dense":
            _ = self.activation
            for name in ("module_input_name", "module_output_name"):
                if self.config.get(name) not in (None, _VECTOR):
                    raise ValueError(f"{self.where}: {name} must be {_VECTOR}, not {self.config[name]}")


def model_kind(path: Path) -> str:
    """Return the class of sentence-transformers that saved a checkpoint directory."""
    return str(_read_object(path / _NAMES).get("model_type", "SentenceTransformer"))


def read_modules(path: Path) -> Sequence[SentenceModule] | None:
    """Return the modules that ``modules.json`` of a checkpoint directory lists, in order; None if it has none.

    Raises ``ValueError`` naming a module that is not supported.
    """
    file = path / "modules.json"
    if not file.is_file() or (kind := model_kind(path)) == "CrossEncoder":
        return None
    if kind != "SentenceTransformer":
        raise ValueError(f"{_NAMES}: model_type {kind} is not supported")
    modules: list[SentenceModule] = []
    has_vector = False
    for entry in _read_json(file, list):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("type", "path")):
            raise ValueError("modules.json must list objects with type and path")
        name = entry["type"]
        module = SentenceModule(name, name.rpartition(".")[2], path / entry["path"])
        # Other packages' modules are code that comes with the checkpoint, which never runs here.
        is_known = name.startswith("sentence_transformers.") and module.kind in (_LATER if modules else _FIRST)
        if not is_known:
            raise ValueError(f"modules.json: the module {name} is not supported")
        has_vector = has_vector or module.kind in ("StaticEmbedding", "Pooling")
        if module.kind in ("Dense", "LayerNorm", "Normalize") and not has_vector:
            raise ValueError(f"modules.json: the module {name} before the pooling is not supported")
        module.check()
        modules.append(module)
    if not modules:
        raise ValueError("modules.json lists no modules")
    if modules[0].kind == "Transformer" and modules[0].directory.resolve() != path.resolve():
        raise ValueError(
            f"modules.json: the transformer is in the folder {modules[0].directory.name}: serve a checkpoint that "
            "holds it in its own directory, as SentenceTransformer.save writes it"
        )
    return modules


@dataclass(frozen=True, slots=True)
class SentenceTexts:
    """Describes how the texts of a checkpoint's vectors become tokens.

    Attributes:
        prompts: What may stand before a text, by name.
        default_prompt: The name of the prompt of a text that names none; None: it gets none.
        max_tokens: Further tokens of a text are dropped; 0: none are.
        keeps_first: Whether the last tokens are dropped, and not the first ones.
        lowers: Whether texts are in lower case.
        pools_prompt: Whether the tokens of the prompt take part in the vector.
        adds_special_tokens: Whether the tokenizer's special tokens stand around the text.
    """

    prompts: Mapping[str, str]
    default_prompt: str | None = None
    max_tokens: int = 0
    keeps_first: bool = True
    lowers: bool = False
    pools_prompt: bool = True
    adds_special_tokens: bool = True

    @property
    def is_plain(self) -> bool:
        """Return whether no text has a prompt, and the tokenizer's special tokens stand around each."""
        return not any(self.prompts.values()) and self.adds_special_tokens

    def prompt(self, name: str) -> str:
        """Return the text of a prompt; an empty name: of the default. Raises ``ValueError`` naming the known ones."""
        if not name:
            return "" if self.default_prompt is None else self.prompts[self.default_prompt]
        if name not in self.prompts:
            raise ValueError(f"prompt_name is {name!r}; the model's prompts are: {', '.join(sorted(self.prompts))}")
        return self.prompts[name]


def read_sentence_texts(path: Path) -> SentenceTexts | None:
    """Read the files of a checkpoint directory; None if it has no ``modules.json``.

    Raises ``ValueError`` naming what is not supported.
    """
    modules = read_modules(path)
    if modules is None:
        return None
    names = _read_object(path / _NAMES)
    prompts = _NO_PROMPTS | {name: text or "" for name, text in _object(names, "prompts", _NAMES).items()}
    if wrong := [name for name, text in prompts.items() if not isinstance(text, str)]:
        raise ValueError(f"{_NAMES}: the prompt {wrong[0]} must be a text")
    default = names.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(f"{_NAMES}: default_prompt_name {default!r} is none of its prompts")
    pools_prompt = all(m.config.get("include_prompt") is not False for m in modules if m.kind == "Pooling")
    if modules[0].kind == "StaticEmbedding":
        return SentenceTexts(prompts, default, pools_prompt=pools_prompt, adds_special_tokens=False)
    settings = _read_settings(path)
    tokenizer = _read_object(path / "tokenizer_config.json")
    return SentenceTexts(
        prompts,
        default,
        max_tokens=_max_tokens(settings, tokenizer, _read_object(path / "config.json")),
        keeps_first=tokenizer.get("truncation_side") != "left",
        lowers=settings.get("do_lower_case") is True,
        pools_prompt=pools_prompt,
    )


def _max_tokens(settings: Mapping[str, Any], tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    own = settings.get("max_seq_length")
    if own is not None:
        if type(own) is not int or own < 1:
            raise ValueError(f"max_seq_length must be a positive integer, not {own!r}")
        return own
    # transformers writes 10^30 for a tokenizer without a limit.
    limits = [tokenizer.get("model_max_length"), config.get("max_position_embeddings")]
    return min((int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 2**31), default=0)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the transformer. Raises ``ValueError`` naming one that would change vectors."""
    file = next((path / name for name in _SETTINGS if (path / name).is_file()), None)
    settings = _read_object(file) if file is not None else {}
    where = "" if file is None else file.name
    if (task := settings.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise ValueError(f"{where}: transformer_task {task} is not supported")
    text = _object(settings, "modality_config", where).get("text")
    if text is not None and (
        not isinstance(text, dict)
        or (text.get("method"), text.get("method_output_name")) != ("forward", "last_hidden_state")
    ):
        raise ValueError(f"{where}: modality_config for text must name forward and last_hidden_state, not {text}")
    kinds = [
        f"{kind}_{ending}" for kind in ("model", "tokenizer", "processor", "config") for ending in ("args", "kwargs")
    ]
    for kind in (*kinds, "processing_kwargs", "query_expansion"):
        if wrong := sorted(_object(settings, kind, where).keys() - _HARMLESS):
            raise ValueError(f"{where}: {kind}: {', '.join(wrong)} is not supported")
    return settings


def _object(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return an entry that is an object; empty if it is absent or null. Raises ``ValueError`` for anything else."""
    entry = values.get(name)
    if entry is not None and not isinstance(entry, dict):
        raise ValueError(f"{where}: {name} must be an object")
    return entry or {}


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; empty if there is no file. Raises ``ValueError``."""
    values: dict[str, Any] = _read_json(path, dict) if path.is_file() else {}
    return values


def _read_json(path: Path, kind: type) -> Any:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, kind):
        raise ValueError(f"{path.name} must hold a JSON {'object' if kind is dict else 'list'}")
    return values
