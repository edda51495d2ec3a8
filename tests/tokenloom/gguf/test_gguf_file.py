"""The head of a GGUF file: values, places of tensors, and files that are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tokenloom.gguf.gguf_file import read_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.long", -(1 << 40))
    writer.add_float32("a.fraction", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.texts", ["x", "yz", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_values_and_tensors(path: Path) -> None:
    file = read_gguf(path)
    found = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert found == {
        "a.number": 7, "a.long": -(1 << 40), "a.fraction": 0.5, "a.flag": True, "a.text": "naïve",
        "a.texts": ["x", "yz", ""], "a.numbers": [1, 2, 3],
    }  # fmt: skip
    content = path.read_bytes()
    first, second = file.tensors["first"], file.tensors["second"]
    assert (first.shape, second.shape) == ((2, 3), (4,))
    assert np.frombuffer(content, np.float32, 6, first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(content, np.float16, 4, second.offset).tolist() == [0, 1, 2, 3]
    begin, end = file.spans["a.text"]
    assert "naïve".encode() in content[begin:end]


def test_a_file_that_is_cut_off_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    head = max(end for _, end in read_gguf(path).spans.values())
    for length in range(4, head, 7):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a valid GGUF file"):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 of GGUF is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "must be 2 or 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "is not a valid GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(60), "it ends before a value of"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"k", 77, 0), "a value of the unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 61), "it ends before a value of"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 1, 0, 1, b"t", 9, 1), "t has 9 dimensions"),
    ],
)
def test_what_is_no_such_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "bad.gguf")


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="is one of 3 files of a model: merge them into one"):
        read_gguf(tmp_path / "model.gguf")
