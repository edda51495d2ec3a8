"""The table of the attention kernels' variants in the documentation: whole, double-buffered, and as compiled now."""

import os
import re
import subprocess
import sys

import pytest
import triton

from tests.gpu_worker.kernels.triton.attention_table import BEGIN, CAPABILITIES, END, NONE, PAGE, VARIANTS, written

ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    if (cells := line.removeprefix("| ").removesuffix(" |").split(" | "))
}


def shared_bytes(cell):
    return int(re.fullmatch(r"\d+, ([\d,]+) B", cell)[1].replace(",", ""))


def test_each_variant_has_a_row():
    assert list(ROWS) == list(VARIANTS)
    for name, variant in VARIANTS.items():
        assert ROWS[name][:2] == [variant.buffers()[0], f"{variant.buffers()[1]:,} B"]
        assert [cell == NONE for cell in ROWS[name][2:]] == [variant.kv_dtype is not None, False, False]


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in VARIANTS for place in range(len(CAPABILITIES)) if ROWS[name][2 + place] != NONE],
)
def test_nothing_spills_and_two_tiles_have_room(name, place):
    wanted = VARIANTS[name].buffers()[1]
    # The registers, and the memory, of heads of 256 have room for one tile of keys and one of values.
    needed = wanted // 2 if "heads of 256" in name else wanted
    assert shared_bytes(ROWS[name][2 + place]) >= needed, (
        "the next keys and values are not on their way while these are used"
    )


def test_a_row_is_what_is_compiled():
    """With the Triton that the page names; another one may take other registers."""
    name, capability = "decodes", 90
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = f"from tests.gpu_worker.kernels.triton.attention_table import cell; print(cell({name!r}, {capability}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.strip()
    assert shared_bytes(found) >= VARIANTS[name].buffers()[1]
    if f"Triton {triton.__version__}" in PAGE.read_text():
        assert found == ROWS[name][2 + list(CAPABILITIES).index(capability)]


def test_writing_again_changes_only_what_is_between_the_marks():
    assert written(f"a {BEGIN}\nold\n{END} b", "new") == f"a {BEGIN}\n\nnew\n\n{END} b"
