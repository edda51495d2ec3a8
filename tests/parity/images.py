"""Prompts with images for an engine, with rows from transformers' towers, and the tokens that the whole model draws."""

import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoints.vision_prompts import UNWRITTEN, Picture, VisionModel, VisionPrompt, picture
from tests.checkpoints.whole_vision import write_whole_vision
from tests.parity.engine import Engine
from tests.parity.identical import Case
from tests.parity.vision_checkpoints import load_vision
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import MediaSpan, RowsKey
from tokenloom.engine_core.data.messages import ArrivedRows, EngineCoreRequest
from tokenloom.gpu_worker.checkpoint.files.text_part import MediaSwitches, media_switches
from tokenloom.request.adapter_names import adapter_salt

NUM_TOKENS = 24
_PROMPTS: list[tuple[list[tuple[int, int, int]], str]] = [
    ([(200, 120, 0)], "What is this?"),
    ([(200, 120, 0), (90, 210, 1)], "And these two?"),
    ([(64, 64, 2)], "What is this icon?"),
    ([(200, 120, 0)], "Why?"),
    ([(200, 120, 3)], "Another one?"),
    ([(31, 400, 4), (120, 120, 5), (333, 47, 6)], "And three?"),
    ([], "Hello there."),
]
"""The widths, heights and seeds of a prompt's images, and its question. The fourth asks about the image of the first;
that of the fifth has the same size, so that the two prompts begin with the same ids."""


@dataclass(frozen=True)
class ImageReference:
    """A whole checkpoint, prompts, and what transformers makes of them."""

    kind: str
    path: Path
    prompts: list[VisionPrompt]
    cases: list[Case]
    media: MediaSwitches

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + NUM_TOKENS

    def with_ids(self, image_id: int) -> "ImageReference":
        """Return the reference with another id in place of those of images."""
        prompts, cases = [], []
        for prompt, case in zip(self.prompts, self.cases, strict=True):
            places = {place for each in prompt.pictures for place in each.places}
            ids = [image_id if place in places else each for place, each in enumerate(prompt.token_ids)]
            prompts.append(replace(prompt, token_ids=ids))
            cases.append(replace(case, prompt=ids))
        return replace(self, prompts=prompts, cases=cases)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # of this process, which removes them at its end


@functools.cache
def image_reference(kind: str) -> ImageReference:
    """Return a family's reference, made once for all tests of a process."""
    return make_image_reference(kind)


def make_image_reference(kind: str, **entries: Any) -> ImageReference:
    """Return the reference of a family's checkpoint with these entries in its configuration."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="images-"))
    return reference_of(kind, write_whole_vision(kind, Path(_FOLDERS[-1].name), **entries))


def reference_of(kind: str, path: Path, merged: Path | None = None) -> ImageReference:
    """Return the reference of a family's checkpoint; ``merged``: the one whose weights give the tokens, if they are
    others."""
    model = VisionModel(kind, path, load_vision(merged or path))
    prompts = [model.prompt([picture(*image) for image in images], text) for images, text in _PROMPTS]
    media = media_switches(json.loads((path / "config.json").read_text()))
    assert media is not None
    return ImageReference(kind, path, prompts, [model.generate(each, NUM_TOKENS) for each in prompts], media)


class ImageEngine(Engine):
    """An engine that gets the rows of images when it asks for them. ``generate`` knows a prompt by its first ids."""

    def __init__(
        self,
        reference: ImageReference,
        *,
        one_key: bool = False,
        without_grid: bool = False,
        causal: bool = False,
        without_times: bool = False,
        **options: Any,
    ) -> None:
        """``one_key``: all images have the same key; ``without_grid``: rotary positions count on in images; ``causal``:
        no token sees later ones; ``without_times``: a frame is one position from the next. Each makes tokens wrong."""
        options.setdefault("max_model_len", reference.longest + 16)
        super().__init__(reference.path, **options)
        self._one_key, self._without_grid, self._causal = one_key, without_grid, causal
        self._without_times = without_times
        self._reference = reference
        self.num_accepted = 0
        """Drafts that were right."""
        self._rows: dict[RowsKey, npt.NDArray[np.float32]] = {}
        self.num_asked = 0
        """Images whose rows were asked for."""
        self._numbers = map(str, itertools.count())
        is_gemma_4 = reference.kind.startswith("gemma4")
        self._sampling: dict[str, Any] = {"logit_bias": dict.fromkeys(UNWRITTEN, -100.0)} if is_gemma_4 else {}

    def generate(  # type: ignore[override]
        self, prompts: Sequence[list[int]], max_tokens: Sequence[int], *, adapter: bytes = b"", **sampling: Any
    ) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for ids, limit in zip(prompts, max_tokens, strict=True):
            name = f"image-{next(self._numbers)}"
            params = CoreSamplingParams(max_tokens=limit, seed=0, **{"temperature": 0.0, **self._sampling, **sampling})
            known = next(each for each in self._reference.prompts if ids[: len(each.token_ids)] == each.token_ids)
            media = [span for each in known.pictures for span in self._spans(each)]
            tokens[name] = []
            salt = adapter_salt(b"", adapter)
            self.core.add_request(EngineCoreRequest(name, ids, params, media=media, adapter=adapter, cache_salt=salt))
        while self.core.has_work():
            outputs = self.core.step()
            for output in outputs.outputs:
                assert not output.error, output.error
                tokens[output.request_id] += output.new_token_ids
                if output.drafts is not None:
                    self.num_accepted += output.drafts.num_accepted_tokens
            self.stats = outputs.scheduler_stats or self.stats
            for wanted in outputs.rows_wanted:
                self.num_asked += 1
                self.core.scheduler.take_rows(ArrivedRows(wanted.key, wanted.number, 0, self._rows[wanted.key]))
        assert self.stats.kv_usage == 0.0, "a block leaked"
        return list(tokens.values())

    def _spans(self, each: Picture) -> list[MediaSpan]:
        media, count = self._reference.media, len(each.rows)
        key = bytes(32) if self._one_key else hashlib.sha256(each.rows.tobytes()).digest()
        runs, grid = each.runs, each.grid
        if len(runs) == grid[0]:
            grid = (1, *grid[1:])  # a run for each frame
        if self._without_grid:
            grid = (0, 0, 0)
        step = 1.0 if self._without_times else each.frame_step
        is_whole = media.seen_whole is not None and not self._causal
        spans = [
            MediaSpan(position, num_tokens, offset, key, count, is_whole, grid, media.levels, step)
            for position, num_tokens, offset in runs
        ]
        self._rows.setdefault(spans[0].rows_key, each.rows)
        return spans
