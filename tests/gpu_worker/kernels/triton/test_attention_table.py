"""The table of the attention kernel's variants in the documentation: whole, double-buffered, and as compiled now."""

import os
import re
import subprocess
import sys

import pytest
import triton

from tests.gpu_worker.kernels.triton.attention_table import BEGIN, END, PAGE, VARIANTS, buffers, written

ROWS = {
    line.split(" | ")[0].removeprefix("| "): line
    for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
}


def shared_bytes(line):
    return int(re.search(r"\d+, ([\d,]+) B", line)[1].replace(",", ""))


def test_each_variant_has_a_row():
    assert list(ROWS) == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_tiles_have_room(name):
    program, wanted = buffers(VARIANTS[name])
    assert f"| {program} | {wanted:,} B |" in ROWS[name]
    assert ("spilled" in ROWS[name]) == (name == "prompts, heads of 256"), (
        "with 8 warps a B200 spills, and more variants"
    )
    # The registers, and the memory, of heads of 256 have room for one tile of keys and one of values.
    needed = wanted // 2 if "heads of 256" in name else wanted
    assert shared_bytes(ROWS[name]) >= needed, "the next keys and values are not on their way while these are used"


def test_a_row_is_what_is_compiled():
    """With the Triton that the page names; another one may take other registers."""
    name = "decodes"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = f"from tests.gpu_worker.kernels.triton.attention_table import row; print(row({name!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.strip()
    assert shared_bytes(found) >= buffers(VARIANTS[name])[1]
    if f"Triton {triton.__version__}" in PAGE.read_text():
        assert found == ROWS[name]


def test_writing_again_changes_only_what_is_between_the_marks():
    assert written(f"a {BEGIN}\nold\n{END} b", "new") == f"a {BEGIN}\n\nnew\n\n{END} b"
