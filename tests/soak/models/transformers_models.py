"""``python -m tests.soak.models.transformers_models``: transformers' causal language models over the paged cache.

Each is a tiny random checkpoint. It must give the tokens of transformers' own ``generate``, chunked and batched, or be
refused before the first request.
"""

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import compute_case
from tests.soak.models.tiny_configs import save_tiny, switches
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.models.transformers.loading import find_causal_class
from tokenloom.gpu_worker.models.transformers.states import keeps_states

KINDS: dict[str, str] = {kind: str(name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
"""Model types and the classes that compute them."""
PROMPTS = [[(i * 7 + j * 3) % 120 + 5 for j in range(length)] for i, length in enumerate((40, 3, 23))]
LONG_PROMPT = [(i * 11) % 120 + 5 for i in range(110)]
"""For models that keep a state, whose prompts are cut at 64 tokens."""
NUM_TOKENS = 12

_BROKEN = "it fails"
"""Begins the reason of a refusal that a model can cause which transformers itself does not compute."""

Verdict = Literal["identical", "refused", "wrong", "no reference"]


class Outcome(NamedTuple):
    """What became of one model type."""

    verdict: Verdict
    reason: str = ""
    state_chunk: int = 0
    """The tokens of a chunk of its layers that keep a state; 0: none does."""


def try_kind(kind: str, directory: Path) -> Outcome:
    """Serve a tiny model of this type, and compare its tokens with those of transformers."""
    try:
        path, model = save_tiny(kind, directory)
    except Exception as error:
        if getattr(getattr(transformers, KINDS[kind], None), "_is_stateful", False):
            return Outcome("refused", f"{KINDS[kind]} is not supported: it keeps a state between tokens")
        return Outcome("no reference", _first_line(error))
    engine = load(path)
    if isinstance(engine, Outcome) and _BROKEN not in engine.reason:
        return engine
    states = engine.core.scheduler.kv.states if isinstance(engine, Engine) else None
    has_states = states is not None
    try:
        # Without a cache: that of some classes gives other tokens, or supports only some of their layers. Those that
        # keep a state compute decoded tokens in another form.
        prompts = [*PROMPTS, LONG_PROMPT] if has_states else PROMPTS
        cases = [compute_case(model, prompt, NUM_TOKENS, use_cache=has_states) for prompt in prompts]
    except Exception as error:
        return Outcome("no reference", _first_line(error))
    if isinstance(engine, Outcome):
        return engine
    return _compare(engine, cases)._replace(state_chunk=0 if states is None else states.chunk)


def load(path: Path) -> Engine | Outcome:
    """Load a checkpoint with transformers' modules, whatever is known of its type, or return why that is refused."""
    rows, context = 4, 64
    try:
        has_states = keeps_states(find_causal_class(path).config)
    except ValueError:
        has_states = False
    budget, blocks = (16, 24) if not has_states else (rows + 64, 40)
    if has_states:
        context = len(LONG_PROMPT) + NUM_TOKENS
    try:
        return Engine(
            path,
            num_blocks=blocks,
            budget=budget,
            max_num_seqs=rows,
            model_impl="transformers",
            max_model_len=context,
            executor=_uni,
        )
    except ValueError as error:
        return Outcome("refused", _first_line(error))
    except Exception as error:
        return Outcome("wrong", f"raised {_first_line(error)}")


def _uni(config: EngineConfig) -> Executor:
    """Return the executor of a worker that asks no table what is served: these are the answers of that table."""
    return UniProcExecutor(CPUWorker(config))


def refused_entries(kind: str, directory: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield the switches of a served type that the engine refuses although transformers computes them, each with its
    value and the reason."""
    for name, value in switches(kind):
        try:
            path, model = save_tiny(kind, directory, **{name: value})
            compute_case(model, PROMPTS[1], 1, use_cache=False)
        except Exception:
            continue  # transformers does not compute it
        if isinstance(outcome := load(path), Outcome):
            yield name, value, outcome.reason


def _compare(engine: Engine, cases: Sequence[Case]) -> Outcome:
    try:
        assert_identical(cases, engine.generate)
    except Exception as error:
        return Outcome("wrong", _first_line(error))
    return Outcome("identical")


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}" if not isinstance(error, ValueError) else lines[0]


def sweep(kinds: Sequence[str], directory: Path) -> dict[str, Outcome]:
    """Try each model type, and print a line for each."""
    outcomes = {}
    for kind in kinds:
        started = time.perf_counter()
        outcomes[kind] = outcome = try_kind(kind, directory)
        shutil.rmtree(directory / kind, ignore_errors=True)
        seconds = time.perf_counter() - started
        print(f"{kind:26s} {seconds:5.1f} s  {outcome.verdict:12s} {outcome.reason}", flush=True)
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return outcomes


def quiet() -> None:
    """Keep transformers' warnings and progress bars out of the table, and compute with one thread."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="model types; by default all")
    kinds = parser.parse_args().kinds or list(KINDS)
    quiet()
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        outcomes = sweep(kinds, Path(directory))
    sys.exit(1 if any(outcome.verdict == "wrong" for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
