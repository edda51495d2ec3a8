"""Models of transformers that keep states, over slots: the driver of this file plans what a scheduler would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from tests.parity.state_checkpoints import EXACT_ANYWHERE, SERVED, make_model, write_model
from tokenloom.engine_core.data.scheduler_output import StateRun
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StateSlots
from tokenloom.gpu_worker.models.self_check import check_model
from tokenloom.gpu_worker.models.transformers.states import _SOFTPLUS, _even_softplus
from tokenloom.gpu_worker.models.transformers.transformers_model import TransformersModel
from tokenloom.gpu_worker.ops.cpu_ops import make_ops

CPU = torch.device("cpu")
BLOCK = 16
NUM_BLOCKS = 24
"""Of each sequence, in a table of its own."""
NUM_SLOTS = 24


def load(path: Path, dtype: Any = "float32") -> Any:
    with torch.inference_mode():
        return TransformersModel(path, dtype, CPU, make_ops("auto", CPU), None)


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


@dataclass
class Row:
    """Holds a sequence of the driver: its tokens, and how many are computed."""

    table: int
    tokens: list[int]
    slot: int = FROM_ZERO
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Driver:
    """Computes steps of a model over blocks and slots."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._backend = make_attention_backend("cpu", model.config, BLOCK, CPU)
        self._caches = self._backend.allocate(NUM_BLOCKS * 12)
        self.slots = StateSlots(model.config, NUM_SLOTS, CPU)
        self.slots.allocate()
        self._num_tables = 0

    def begin(self, tokens: Sequence[int], slot: int = FROM_ZERO) -> Row:
        self._num_tables += 1
        return Row(self._num_tables - 1, list(tokens), slot)

    @torch.inference_mode()
    def step(self, *work: tuple[Row, Sequence[tuple[int, int]]]) -> None:
        """Compute runs of these sequences: each of so many tokens, whose state goes to a slot."""
        runs, ids, positions, lengths = [], [], [], [0]
        for sequence, parts in work:
            begin = sequence.done
            for count, written in parts:
                runs.append(StateRun("", count, sequence.slot, written))
                sequence.slot, sequence.done = written, sequence.done + count
            ids += sequence.tokens[begin : sequence.done]
            positions.append(np.arange(begin, sequence.done))
            lengths.append(sequence.done - begin)
        tables = np.array([[s.table * NUM_BLOCKS + i for i in range(NUM_BLOCKS)] for s, _ in work])
        where = [table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
        ends = np.array([sequence.done for sequence, _ in work])
        plan = self._backend.plan(np.cumsum(lengths), ends, tables, np.concatenate(where))
        places = torch.from_numpy(np.concatenate(positions))
        hidden = self._model.forward(torch.tensor(ids), places, self._caches, plan, (), self.slots.plan(runs))
        logits = self._model.compute_logits(hidden).split(lengths[1:])
        for (sequence, _), part in zip(work, logits, strict=True):
            sequence.logits.append(part)

    def decode(self, *work: tuple[Row, int]) -> None:
        """Append the best token to each of these sequences, and compute it; its state goes to a slot."""
        for sequence, _ in work:
            sequence.tokens.append(int(sequence.logits[-1][-1].argmax()))
        self.step(*((sequence, [(1, slot)]) for sequence, slot in work))


def generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SERVED)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks beside each other and beside decoding rows, two runs of a prompt in a step, a fork."""
    driver = Driver(load(write_model(kind, tmp_path)))
    prompt = draw(141, seed=1)
    long, short, one = driver.begin(prompt), driver.begin(draw(5, seed=2)), driver.begin(draw(1, seed=3))
    driver.step((long, [(64, 0)]), (short, [(5, 1)]))
    driver.decode((short, 2))
    short.tokens.append(int(short.logits[-1][-1].argmax()))
    driver.step((short, [(1, 2)]), (long, [(64, 3), (13, 4)]), (one, [(1, 5)]))
    for _ in range(6):
        driver.decode((long, 4), (short, 2), (one, 5))
    reference = make_model(kind)
    for sequence, length in ((long, 141), (short, 5), (one, 1)):
        assert sequence.tokens == generate(reference, sequence.tokens[:length], len(sequence.tokens) - length)


@pytest.mark.parametrize("kind", SERVED)
def test_tokens_that_were_decoded_once_are_computed_again_in_runs_of_one_step(kind: str, tmp_path: Path) -> None:
    """As after a preemption. Attention computes them together, which in bfloat16 may round otherwise."""
    driver = Driver(load(write_model(kind, tmp_path)))
    rows = [driver.begin(draw(length, seed=length)) for length in (70, 9)]
    for slot, row in enumerate(rows):
        driver.step((row, [(len(row.tokens), slot)]))
    for _ in range(3):
        driver.decode((rows[0], 0), (rows[1], 1))
    again = [driver.begin(row.tokens) for row in rows]
    driver.step((again[0], [(70, 2), (1, 2), (1, 3), (1, 2)]), (again[1], [(9, 4), (1, 4), (1, 4), (1, 4)]))
    for row, other in zip(rows, again, strict=True):
        torch.testing.assert_close(torch.cat(other.logits), torch.cat(row.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SERVED)
def test_a_slot_that_is_only_read_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    driver = Driver(load(write_model(kind, tmp_path)))
    first = driver.begin(draw(70, seed=4))
    driver.step((first, [(64, 7), (6, 8)]))
    before = [[each.clone() for each in layer if each is not None] for layer in driver.slots.layers if layer]
    driver.decode((first, 9))
    driver.decode((first, 9))
    after = [[each for each in layer if each is not None] for layer in driver.slots.layers if layer]
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            others = [slot for slot in range(NUM_SLOTS) if slot != 9]
            assert torch.equal(a[others], b[others])
            assert not torch.equal(b[8], b[9])


@pytest.mark.parametrize("kind", SERVED)
def test_in_bfloat16_prompts_cut_at_whole_chunks_have_the_bits_of_uncut_ones(kind: str, tmp_path: Path) -> None:
    driver = Driver(load(write_model(kind, tmp_path, torch.bfloat16), "bfloat16"))
    prompt = draw(150, seed=5)
    whole, steps, runs = (driver.begin(prompt) for _ in range(3))
    driver.step((whole, [(150, 0)]))
    driver.step((steps, [(64, 1)]))
    driver.step((steps, [(64, 2)]))
    driver.step((steps, [(22, 3)]))
    driver.step((runs, [(128, 4), (22, 5)]))
    for cut in (steps, runs):
        assert torch.equal(torch.cat(cut.logits), torch.cat(whole.logits))
    for _ in range(4):
        driver.decode((whole, 0), (steps, 3))
        driver.decode((runs, 6))
    assert torch.equal(torch.cat(steps.logits), torch.cat(whole.logits))
    assert torch.equal(torch.cat(runs.logits), torch.cat(whole.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SERVED)
def test_a_right_model_passes_the_self_check(kind: str, dtype: str, tmp_path: Path) -> None:
    model = load(write_model(kind, tmp_path, getattr(torch, dtype)), dtype)
    check_model(model, make_attention_backend("cpu", model.config, BLOCK, CPU), BLOCK, CPU)
    assert model.config.states.chunk == (1 if kind in EXACT_ANYWHERE else 64)


def test_prompts_of_modules_with_large_chunks_are_cut_at_smaller_ones(tmp_path: Path) -> None:
    """transformers makes a tensor of chunk x chunk x heads x state size for each chunk of a call."""
    driver = Driver(load(write_model("mamba2", tmp_path, chunk_size=256)))
    prompt, tails = draw(300, seed=9), (66, 65, 44)
    for number, tail in enumerate(tails):
        row = driver.begin(prompt[: 192 + tail])
        driver.step((row, [(64, number)]))
        driver.step((row, [(128 + tail, number)]))
        driver.decode((row, number))
        whole = driver.begin(row.tokens)
        driver.step((whole, [(192 + tail, 9)]))
        assert torch.equal(whole.logits[-1][-1], row.logits[-2][-1])
        assert row.tokens == generate(make_model("mamba2", chunk_size=256), row.tokens[:-1], 1)


CUTS = [[16] * 9, [37, 64, 20], [1] * 149]


# Jamba's attention rounds otherwise for one token than for several, and its routers then choose other experts.
@pytest.mark.parametrize(
    ("kind", "cuts"), [(kind, cuts) for kind in EXACT_ANYWHERE for cuts in CUTS if kind != "jamba" or cuts[0] > 1]
)
def test_scans_and_convolutions_have_the_same_bits_wherever_a_prompt_is_cut(
    kind: str, cuts: list[int], tmp_path: Path
) -> None:
    driver = Driver(load(write_model(kind, tmp_path, torch.bfloat16), "bfloat16"))
    whole, cut = (driver.begin(draw(150, seed=6)) for _ in range(2))
    driver.step((whole, [(150, 0)]))
    for count in [*cuts, 150 - sum(cuts)]:
        driver.step((cut, [(count, 1)]))
    assert torch.equal(torch.cat(cut.logits), torch.cat(whole.logits))


@pytest.mark.parametrize("kind", ["granitemoehybrid", "mamba2"])
def test_a_last_token_alone_is_computed_in_another_form(kind: str, tmp_path: Path) -> None:
    """Why a prompt's tail has at least two tokens: Mamba-2's modules multiply in bfloat16 for one token, in float32 for
    more."""
    driver = Driver(load(write_model(kind, tmp_path, torch.bfloat16), "bfloat16"))
    whole, two, one = (driver.begin(draw(129, seed=7)) for _ in range(3))
    driver.step((whole, [(129, 0)]))
    driver.step((two, [(64, 1), (65, 1)]))
    driver.step((one, [(128, 2), (1, 2)]))
    last = [sequence.logits[-1][-1] for sequence in (whole, two, one)]
    assert torch.equal(last[1], last[0])
    assert not torch.equal(last[2], last[0])
    assert (last[2] - last[0]).norm() < 0.1 * last[0].norm()


def test_nemotron_h_clamps_steps_of_time_in_prompts_only() -> None:
    """What transformers 5.24 does, and so does this engine: a token that decodes has no least step of time."""
    model = make_model("nemotron_h")
    mixer = model.model.layers[0].mixer
    mixer.dt_bias.fill_(-20.0)  # softplus(-20) is far below time_step_min
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    states = []
    for count in (2, 1):
        cache = DynamicCache(config=model.config)
        mixer(torch.cat([x, x], 1)[:, :count], cache=cache)
        if count == 1:
            mixer(x, cache=cache)
        states.append(cache.get_recurrent_state(0))
    assert not torch.allclose(states[0], states[1], rtol=0.1)


def test_bamba_is_given_its_positions(tmp_path: Path) -> None:
    """Without them its class numbers the tokens of each call from 0 on."""
    reference, prompt = make_model("bamba"), torch.tensor([draw(100, seed=8)])
    with torch.inference_mode():
        expected, cache = reference(prompt, use_cache=False).logits[0, -1], DynamicCache(config=reference.config)
        reference(prompt[:, :64], cache=cache, use_cache=True)
        unnumbered = reference(prompt[:, 64:], cache=cache, use_cache=True).logits[0, -1]
    driver = Driver(load(write_model("bamba", tmp_path)))
    sequence = driver.begin(prompt[0].tolist())
    driver.step((sequence, [(64, 0)]))
    driver.step((sequence, [(36, 0)]))
    torch.testing.assert_close(sequence.logits[-1][-1], expected, rtol=1e-4, atol=1e-4)
    assert (unnumbered - expected).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba"])
def test_modules_that_restart_a_continued_prompt_are_not_what_computes_it(kind: str, tmp_path: Path) -> None:
    """What transformers 5.24 does without an error, where the tokens of this engine are right."""
    reference, prompt = make_model(kind), torch.tensor([draw(40, seed=10)])
    with torch.inference_mode():
        expected, cache = reference(prompt, use_cache=False).logits[0, -1], DynamicCache(config=reference.config)
        for part in prompt.split(20, dim=1):
            found = reference(part, cache=cache, use_cache=True).logits[0, -1]
    assert (found - expected).norm() > 0.05 * expected.norm()
    driver = Driver(load(write_model(kind, tmp_path)))
    row = driver.begin(prompt[0].tolist())
    driver.step((row, [(20, 0)]))
    driver.step((row, [(20, 0)]))
    torch.testing.assert_close(row.logits[-1][-1], expected, rtol=1e-4, atol=1e-4)


def test_other_modules_that_restart_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.gpu_worker.models.transformers.states.is_selective_scan", lambda module: False)
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported: it restarts its state from zero"):
        load(write_model("mamba", tmp_path))


def test_a_decay_has_the_same_bits_wherever_it_lies() -> None:
    """With AVX2 PyTorch's own softplus gave 1,711 of 3,600 elements another last bit alone than in a batch of 12."""
    x = torch.randn(12, 1, 5, generator=torch.Generator().manual_seed(0)) * 4
    with _even_softplus():
        whole = F.softplus(x)
        assert torch.equal(whole, torch.cat([F.softplus(row[None]) for row in x]))
        assert torch.equal(whole[3:7], F.softplus(x.transpose(0, 1)[:, 3:7]).transpose(0, 1))
    torch.testing.assert_close(whole, F.softplus(x))
    assert F.softplus is _SOFTPLUS


def test_a_decay_has_the_same_bits_on_any_number_of_threads() -> None:
    """As many as PyTorch divides among three of four threads, whose ranges would end within a vector."""
    x = torch.randn(98_000, generator=torch.Generator().manual_seed(0)) * 4
    with _even_softplus():
        expected = F.softplus(x)
        torch.set_num_threads(4)
        try:
            found = F.softplus(x)
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found, expected)
