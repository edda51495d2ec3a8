"""The offline API on a GGUF file, and on the weights that the file stands for."""

import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tokenloom.gguf.demo_file import write_demo_file
from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.process import cache_directory

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_llm(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", max_model_len=256, num_gpu_blocks_override=64)


def test_a_file_is_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tokenizer of the file is converted here, and not read from what an earlier run has kept; kernels are not built
    # anew.
    kernels = cache_directory() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "tokenloom").mkdir()
    (tmp_path / "tokenloom" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = write_demo_file(tmp_path / "demo.gguf")
    plain = tmp_path / "plain"
    shutil.copytree(DEMO_MODEL, plain, ignore=shutil.ignore_patterns("*.safetensors", "modules.json", "__*"))
    save_file({name: torch.from_numpy(value) for name, value in values.items()}, plain / "model.safetensors")
    question = [{"role": "user", "content": "What is prefill?"}]
    answers = []
    for path in (tmp_path / "demo.gguf", plain):
        with closing(make_llm(path)) as llm:
            chat = llm.chat(question, GREEDY, use_tqdm=False)[0].outputs[0]
            story = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0]
            constraint = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex=r"[A-C]{2}-\d"))
            code = llm.generate("Once", constraint, use_tqdm=False)[0].outputs[0].text
            assert re.fullmatch(r"[A-C]{2}-\d", code)
            answers.append((chat.token_ids, chat.finish_reason, story.token_ids))
    assert answers[0] == answers[1]


def test_reloading_the_weights_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo_file(path)
    with closing(make_llm(path)) as llm:
        before = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        llm.sleep(1)
        llm.wake_up()
        llm.reload_weights(path)
        assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
