"""Answers in Markdown on a terminal."""

import io
import random

import pytest
from rich.console import Console

from tokenloom.cli.chat.markdown import MarkdownView, rendered, split

ANSWER = """# Title

A paragraph with **bold**
and `code`.

1. one

   still one
2. two

```python
def f():

    return "<b>"
```

| a | b |
|---|---|
| 1 | 2 |

<think>not lost</think> and [a link](http://x/y).
"""
BLOCKS = [
    "# Title\n\n",
    "A paragraph with **bold**\nand `code`.\n\n",
    "1. one\n\n   still one\n2. two\n\n",
    '```python\ndef f():\n\n    return "<b>"\n```\n\n',
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n",
]


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False, color_system=None)


def test_blocks_end_at_blank_lines_outside_of_code_and_lists() -> None:
    blocks, rest = split(ANSWER)
    assert blocks == BLOCKS
    assert rest == "<think>not lost</think> and [a link](http://x/y).\n"
    assert split("a\n\n") == ([], "a\n\n")
    assert split("````\n```\n\nx\n````\n\nend") == (["````\n```\n\nx\n````\n\n"], "end")
    assert split("") == ([], "")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_give_the_same_blocks(seed: int) -> None:
    rng, left, blocks, pending = random.Random(seed), ANSWER, list[str](), ""
    while left:
        size = rng.randint(1, 9)
        done, pending = split(pending + left[:size])
        blocks += done
        left = left[size:]
    assert blocks == BLOCKS
    assert "".join(blocks) + pending == ANSWER


def test_an_answer_is_printed_once_and_nothing_of_it_is_lost() -> None:
    console = plain()
    view = MarkdownView(console)
    for at in range(0, len(ANSWER), 7):
        view.add(ANSWER[at : at + 7])
    view.end()
    text = shown(console)
    for part in ("Title", "bold", "still one", 'return "<b>"', "<think>not lost</think>", "http://x/y"):
        assert text.count(part) == 1, part
    assert "**" not in text
    assert "```" not in text


def test_an_answer_cannot_command_the_terminal() -> None:
    console = plain()
    view = MarkdownView(console)
    view.add("a\x1b]0;title\x07b\x9b31mc\r\n")
    view.end()
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown(console))


def test_a_stopped_answer_shows_what_has_arrived() -> None:
    console = plain()
    view = MarkdownView(console)
    view.add("```\nhalf of a ")
    view.end()
    view.end()
    assert shown(console).count("half of a") == 1


def test_a_table_is_drawn() -> None:
    console = plain()
    console.print(rendered(BLOCKS[-1]))
    assert "|---|" not in shown(console)
