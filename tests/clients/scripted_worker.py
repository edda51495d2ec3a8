"""A worker that writes what a script says, for a real mesh: it reads its prompt back from the paged cache.

A block that the prefix cache took for another one would change the prompt that the script sees.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.fake_workers.hash_row import HashRow
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL

Script = Callable[[str], str]
"""Returns the answer to a prompt, as the model writes it."""
_END = "<|im_end|>"


class ScriptedWorker(HashWorker):
    """Args:
    script: Called once for each request.
    """

    def __init__(self, config: EngineConfig, script: Script) -> None:
        super().__init__(config)
        self._script = script
        self._tokenizer: Tokenizer = load_tokenizer(DEMO_MODEL)
        self._answers: dict[tuple[int, ...], Sequence[int]] = {}

    def _sample(self, row: HashRow, drafts: list[int], allowed: list[npt.NDArray[np.intp]] | None) -> list[int]:
        if row.num_computed < len(row.token_ids):
            return []
        assert not drafts, "the script needs no drafts"
        assert allowed is None, "a grammar would not let the script write its calls"
        prompt = tuple(self._cache[row.slots[: row.num_prompt_tokens], 0].tolist())
        if (answer := self._answers.get(prompt)) is None:
            text = self._script(self._tokenizer.decode(prompt, skip_special_tokens=False))
            answer = self._answers[prompt] = self._tokenizer.encode(text + _END).ids
        token_id = answer[len(row.token_ids) - row.num_prompt_tokens]
        row.token_ids.append(token_id)
        return [token_id]
