"""Checkpoints whose only tokenizer is a ``tokenizer.model`` of SentencePiece, as Llama 2 and Mistral 7B were published.

The files are written with the messages of transformers' ``sentencepiece_model_pb2_new``; the ids that stand here are
those of the library sentencepiece 0.2.3 for the same file.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaTokenizer, T5Tokenizer, XLMRobertaTokenizer
from transformers.tokenization_utils_base import generate_merges
from transformers.utils import sentencepiece_model_pb2_new as pb

from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.model_files.checkpoint import load_tokenizer, tokenizer_file, tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.preflight.findings import CannotServe
from tokenloom.preflight.model import check_tokenizer
from tokenloom.request.errors import InvalidArgument

WORDS = "▁t he ▁the ▁th in ▁a er on ▁s re ▁w ing and ▁and ed ▁o ▁of ▁is is ▁c at ▁cat ▁do g ▁dog"
"""In the order in which they are merged."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
UNIGRAM, BPE, WORD = 1, 2, 3
EXPECTED = {
    "the cat and the dog": [262, 281, 265, 310, 300, 262, 323, 300, 311, 303],
    "a<mark>the dog": [265, 3, 316, 261, 323, 300, 311, 303],
    "é☃": [323, 199, 173, 230, 156, 135],
    "": [],
    "thing\n1,2": [263, 271, 284, 288, 285, 289],
    "there is.": [262, 269, 277, 286],
}


def make_model(model_type: int = BPE, **normalizer: Any) -> Any:
    model = pb.ModelProto()
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [("<mark>", 0.0, USER_DEFINED), *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256))]
    merged = [word for word in WORDS.split() if len(word) > 1]
    letters = sorted({*"".join(WORDS.split()), *"abcdefghijklmnopqrstuvwxyz0123456789.,\n"})
    pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate([*merged, *letters])]
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = model_type, True
    spec = {"name": "identity", "add_dummy_prefix": True, "remove_extra_whitespaces": False} | normalizer
    for name, value in spec.items():
        setattr(model.normalizer_spec, name, value)
    return model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The files that both models were published with, without their weights."""
    write(tmp_path, make_model())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": False}))
    return tmp_path


def write(directory: Path, model: Any) -> None:
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())


def test_texts_have_the_tokens_of_sentencepiece_after_the_begin_token(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    for text, ids in EXPECTED.items():
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a</s>").ids == [1, 265, 2]
    assert tokenizer.decode([1, 265, 2]) == "a"


def test_and_those_of_transformers(directory: Path) -> None:
    model = make_model()
    vocab = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    reference = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True)
    reference.add_tokens(["<mark>"])
    tokenizer = load_tokenizer(directory)
    for text in (*EXPECTED, " two  blanks", "the\tthe ", "<mark>", "<mark> the", "\U0001f642 of the dogs"):
        assert tokenizer.encode(text).ids == reference(text).input_ids, text
        assert tokenizer.decode(tokenizer.encode(text).ids) == reference.decode(
            reference(text).input_ids, skip_special_tokens=True
        )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"add_bos_token": False}, [262]),
        ({"add_eos_token": True}, [1, 262, 2]),
        ({"add_prefix_space": False}, [1, 316, 261]),
    ],
)
def test_the_configuration_decides_what_is_added(directory: Path, changes: dict[str, Any], expected: list[int]) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert load_tokenizer(directory).encode("the").ids == expected


def test_the_models_normalizer_decides_about_blanks(directory: Path) -> None:
    write(directory, make_model(add_dummy_prefix=False))
    assert load_tokenizer(directory).encode("the").ids == [1, 316, 261]
    write(directory, make_model(remove_extra_whitespaces=True))
    assert load_tokenizer(directory).encode("  the   cat ").ids == load_tokenizer(directory).encode("the cat").ids


def test_other_kinds_and_broken_files_are_refused_by_name_before_a_start(directory: Path) -> None:
    write(directory, make_model(WORD))
    with pytest.raises(InvalidArgument, match="is a word model of SentencePiece; only BPE and unigram are read"):
        load_tokenizer(directory)
    with pytest.raises(CannotServe, match=r"word model .*save_pretrained"):
        check_tokenizer(directory, {})
    write(directory, make_model(UNIGRAM))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLNetTokenizer"}))
    with pytest.raises(CannotServe, match="whose ids XLNetTokenizer arranges in a way that is not read"):
        check_tokenizer(directory, {})
    (directory / "tokenizer.model").rename(directory / "spiece.model")
    with pytest.raises(CannotServe, match=r"only spiece\.model, which is not read"):
        check_tokenizer(directory, {})
    (directory / "spiece.model").rename(directory / "tokenizer.model")
    (directory / "tokenizer_config.json").unlink()
    whole = make_model().SerializeToString()
    for broken in (b"", b"x", whole[:-3], b"\xff" * 40, whole[: len(whole) // 2], b"\x0a\xff\xff\xff\xff\x7f"):
        (directory / "tokenizer.model").write_bytes(broken)
        with pytest.raises(InvalidArgument, match=r"tokenizer\.model is no model of SentencePiece"):
            load_tokenizer(directory)
        with pytest.raises(CannotServe, match=r"tokenizer\.model is no model of SentencePiece"):
            check_tokenizer(directory, {})


def test_the_fingerprint_is_that_of_the_file(directory: Path) -> None:
    before = tokenizer_fingerprint(directory)
    write(directory, make_model(add_dummy_prefix=False))
    assert tokenizer_fingerprint(directory) != before


def test_a_model_runs_with_it_and_obeys_grammars(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory / "home"))
    shutil.copy(DEMO_MODEL / "config.json", directory)
    check_tokenizer(directory, json.loads((directory / "config.json").read_text()))
    saved = tokenizer_file(directory)
    assert saved is not None
    assert saved.is_relative_to(directory / "home")
    llm = LLM(directory, worker="hash", tokenizer_mode="slow")
    choice = StructuredOutputsParams(choice=["the dog", "a cat"])
    (output,) = llm.generate("the", SamplingParams(structured_outputs=choice, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == [1, 262]
    assert output.outputs[0].text in choice.choice
    llm.close()


UNIGRAM_EXPECTED = {
    "the cat and the dog": [260, 261, 281, 273, 260, 261, 283],
    "a<mark>the dog": [265, 3, 316, 261, 283],
    "é☃": [323, 199, 173, 230, 156, 135],
    "": [],
    "thing\n1,2": [263, 271, 284, 288, 285, 289],
    "there is.": [260, 261, 269, 277, 286],
    "theing": [260, 261, 271],
}
"""Of sentencepiece too: other cuts than those of BPE, by the sum of scores."""


def best_cut(model: Any, text: str) -> list[int]:
    """Return the ids with the highest sum of scores: an independent search over all ways to cut a text."""
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    longest, unknown = max(map(len, scores)), min(scores.values()) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        starts = range(max(0, end - longest), end)
        known = [(start, scores[text[start:end]]) for start in starts if text[start:end] in scores]
        if text[end - 1] not in scores:
            known.append((end - 1, unknown))
        best.append(max((best[start][0] + score, [*best[start][1], text[start:end]]) for start, score in known))
    found = []
    for part in best[-1][1]:
        found += [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def test_texts_have_the_unigrams_with_the_highest_sum_of_scores(directory: Path) -> None:
    model = make_model(UNIGRAM, remove_extra_whitespaces=True)
    random_ = random.Random(0)
    for piece in model.pieces:
        if piece.type == NORMAL:
            piece.score = -random_.uniform(2, 12)
    write(directory, model)
    check_tokenizer(directory, {})
    tokenizer = load_tokenizer(directory)
    words = [word.strip("▁") for word in WORDS.split()]
    for _ in range(2000):
        text = "".join(random_.choice([*words, *"abc. ,1\né☃🙂", " "]) for _ in range(random_.randrange(1, 12)))
        cut = " ".join(part for part in text.split(" ") if part)
        expected = best_cut(model, "▁" + cut.replace(" ", "▁")) if cut else []
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.decode(expected) == cut


def test_unigrams_are_those_of_sentencepiece(directory: Path) -> None:
    write(directory, make_model(UNIGRAM))
    tokenizer = load_tokenizer(directory)
    for text, ids in UNIGRAM_EXPECTED.items():
        assert tokenizer.encode(text).ids == [1, *ids]


PAIR = ("the cat", "a dog and")


@pytest.mark.parametrize("file", ["spiece.model", "tokenizer.model"])
def test_the_tokens_that_t5_adds(directory: Path, file: str) -> None:
    """As ``models/t5/tokenization_t5.py`` and ``T5Converter`` of transformers have them."""
    model = t5_model()
    (directory / "tokenizer.model").unlink()
    (directory / file).write_bytes(model.SerializeToString())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 10}))
    check_tokenizer(directory, {})
    vocabulary = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(10))]
    reference = T5Tokenizer(vocab=vocabulary, extra_ids=10)
    tokenizer = load_tokenizer(directory)
    for text in (*EXPECTED, "the <extra_id_3> cat", *PAIR):
        if "\n" not in text and "<mark>" not in text:
            assert tokenizer.encode(text).ids == reference(text).input_ids, text
    assert tokenizer.encode(*PAIR).ids == reference(*PAIR).input_ids


def t5_model() -> Any:
    model = make_model(UNIGRAM, remove_extra_whitespaces=True)
    model.trainer_spec.byte_fallback = False
    del model.pieces[3:260]
    for number, (text, kind) in enumerate((("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN))):
        model.pieces[number].piece, model.pieces[number].type = text, kind
    return model


def test_the_ids_of_xlm_roberta_are_those_of_fairseq(directory: Path) -> None:
    """As ``models/xlm_roberta/tokenization_xlm_roberta.py`` and ``XLMRobertaConverter`` of transformers have them."""
    model = make_model(UNIGRAM, remove_extra_whitespaces=True)
    model.trainer_spec.byte_fallback = False
    del model.pieces[3:260]
    (directory / "tokenizer.model").unlink()
    (directory / "sentencepiece.bpe.model").write_bytes(model.SerializeToString())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizerFast"}))
    check_tokenizer(directory, {})
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [*((piece.piece, piece.score) for piece in model.pieces[3:]), ("<mask>", 0.0)]
    reference = XLMRobertaTokenizer(vocab=vocabulary)
    tokenizer = load_tokenizer(directory)
    for text in EXPECTED:
        if "\n" not in text and "<mark>" not in text:
            assert tokenizer.encode(text).ids == reference(text).input_ids, text
    assert tokenizer.encode(*PAIR).ids == reference(*PAIR).input_ids
    assert tokenizer.token_to_id("<mask>") == reference.mask_token_id
