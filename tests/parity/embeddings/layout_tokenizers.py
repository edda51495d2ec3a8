"""Tokenizers of the kinds that published embedding models have, with small vocabularies of our own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_TEXT = "the a cat dog ship sails over of night sea query passage text find for this in red old light harbour"
_WORDS = _TEXT.split()
_LETTERS = [chr(code) for code in range(33, 127)]


def _word_pieces(path: Path, special: Sequence[str], ends: tuple[str, str], settings: Mapping[str, Any]) -> int:
    """Save BERT's kind of tokenizer. Returns the size of the vocabulary."""
    lower = settings["do_lower_case"]
    tokens = [*special, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *_WORDS]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=settings["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _surround(tokenizer, *ends)
    return _save(path, tokenizer, settings)


def bert_of_128(path: Path, **settings: Any) -> int:
    """Save a tokenizer whose file cuts and pads to a length, as that of all-MiniLM-L6-v2; callers decide instead."""
    size = bert(path, **settings)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(path / "tokenizer.json"))
    return size


def bert(path: Path, **settings: Any) -> int:
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    common = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return _word_pieces(path, names, ("[CLS]", "[SEP]"), common | dict(zip(kinds, names, strict=True)) | settings)


def mpnet(path: Path, **settings: Any) -> int:
    names = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    common = {"tokenizer_class": "MPNetTokenizer", "do_lower_case": True, "model_max_length": 64}
    kinds = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    named = dict(zip(kinds, names, strict=True)) | {"bos_token": "<s>", "eos_token": "</s>"}
    return _word_pieces(path, names, ("<s>", "</s>"), common | named | settings)


def _byte_pairs(path: Path, special: Sequence[str], ends: tuple[str, str], settings: Mapping[str, Any]) -> int:
    """Save a tokenizer of byte pairs, GPT-2's kind, which merges nothing but the letters of one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *letters, "th", "the"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    _surround(tokenizer, *ends)
    return _save(path, tokenizer, settings)


def roberta(path: Path, **settings: Any) -> int:
    names = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    kinds = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    named = dict(zip(kinds, names, strict=True)) | {"cls_token": "<s>", "sep_token": "</s>"}
    return _byte_pairs(
        path, names, ("<s>", "</s>"), {"tokenizer_class": "RobertaTokenizer", "model_max_length": 64} | named | settings
    )


def qwen(path: Path, **settings: Any) -> int:
    common = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return _byte_pairs(path, names, ("", "<|endoftext|>"), common | {"model_max_length": 131072} | settings)


def _unigram(path: Path, special: Sequence[str], ends: tuple[str, str], settings: Mapping[str, Any]) -> int:
    """Save SentencePiece's kind of tokenizer, as XLM-RoBERTa and T5 have it."""
    pieces = [(token, 0.0) for token in special] + [("▁", -3.0), *((letter, -6.0) for letter in _LETTERS)]
    pieces += [(f"▁{word}", -4.0 - index / 10) for index, word in enumerate(_WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=list(special).index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(special))
    _surround(tokenizer, *ends)
    return _save(path, tokenizer, settings)


def xlm_roberta(path: Path, **settings: Any) -> int:
    names = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    named |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    common = {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": 64}
    return _unigram(path, names, ("<s>", "</s>"), common | named | settings)


def t5(path: Path, **settings: Any) -> int:
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": 0}
    common = {"tokenizer_class": "T5Tokenizer", "model_max_length": 512}
    return _unigram(path, ("<pad>", "</s>", "<unk>"), ("", "</s>"), common | named | settings)


def gemma(path: Path, **settings: Any) -> int:
    """Save Gemma's kind: byte pairs over pieces with a mark for blanks, between ``<bos>`` and ``<eos>``."""
    return _marked_pairs(
        path, ("<pad>", "<eos>", "<bos>", "<unk>"), ("<bos>", "<eos>"), {"tokenizer_class": "GemmaTokenizer"} | settings
    )


def llama(path: Path, **settings: Any) -> int:
    """Save Llama's kind, which puts ``</s>`` after the text, as e5-mistral-7b-instruct's does."""
    return _marked_pairs(
        path, ("<unk>", "<s>", "</s>"), ("<s>", "</s>"), {"tokenizer_class": "LlamaTokenizer"} | settings
    )


def _marked_pairs(path: Path, special: Sequence[str], ends: tuple[str, str], settings: Mapping[str, Any]) -> int:
    pieces = [*special, "▁", *_LETTERS, "▁t", "▁th"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens(list(special))
    _surround(tokenizer, *ends)
    names = dict(zip(("bos_token", "eos_token"), ends, strict=True))
    names |= {"unk_token": "<unk>", "pad_token": special[0]}
    adds = {"add_bos_token": True, "add_eos_token": True, "model_max_length": 64}
    return _save(path, tokenizer, adds | names | settings)


def _surround(tokenizer: Tokenizer, first: str, last: str) -> None:
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((first, last)) if token]
    single = " ".join(part for part in (first, "$A", last) if part)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=special
    )


def _save(path: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> int:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()
