"""Train the demo model's tokenizer: byte-level BPE on the generated text, with a chat template for tools."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .tools import Document

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_MARKS = ["<tool_call>", "</tool_call>", "<tools>", "</tools>"]
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a token cannot cross: words with the space before them, and each digit by itself."""


def train_tokenizer(documents: Iterable[Document], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` entries; the marks of a tool call stay visible in decoded text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CALL_MARKS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(map(_plain_text, documents), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def _plain_text(document: Document) -> str:
    if "text" in document:
        return str(document["text"])
    turns = "".join(message["role"] + "\n" + message["content"] for message in document["messages"])
    return json.dumps(document.get("tools", "")) + turns


def encode(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[bool]]]:
    """Token ids of each document, and for each token whether the model is to learn it: only its own turns count."""
    header = tokenizer(f"{TURN_START}assistant\n").input_ids
    turn_end = tokenizer(TURN_END).input_ids[0]
    for document in documents:
        if "text" in document:
            ids = tokenizer(document["text"] + END_OF_TEXT).input_ids
            yield ids, [True] * len(ids)
            continue
        tools = document.get("tools")
        ids = tokenizer(tokenizer.apply_chat_template(document["messages"], tools=tools, tokenize=False)).input_ids
        yield ids, own_turns(ids, header, turn_end)


def own_turns(ids: list[int], header: list[int], turn_end: int) -> list[bool]:
    """True from after each assistant header up to and with the end of that turn."""
    own, speaking = [], False
    for i, token in enumerate(ids):
        own.append(speaking)
        if speaking and token == turn_end:
            speaking = False
        elif ids[max(0, i + 1 - len(header)) : i + 1] == header:
            speaking = True
    return own
