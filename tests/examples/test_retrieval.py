"""The example of retrieval finds passages and builds prompts whose beginnings repeat."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.retrieval import Passage, conversation, index, passages, search

_LEASE = Passage("kv.md: Lease", "A lease names KV blocks and their generations.")
_STEP = Passage("engine.md: Step", "A step computes tokens within the token budget.")


def test_paragraphs_of_files_become_passages(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.md").write_text("# First\n\nOne.\n\nTwo.\n\n## Second\n\n" + "x" * 1500)
    found = list(passages(tmp_path))
    assert [each.source for each in found] == ["a/b.md: First", "a/b.md: First", "a/b.md: Second"]
    assert [len(each.text) for each in found] == [4, 4, 1200]


def test_the_best_passage_is_found_by_its_words() -> None:
    database = index([_STEP, _LEASE])
    assert search(database, "What does a lease name?", 1) == [_LEASE]
    assert search(database, "budgets of a step: tokens?", 1) == [_STEP], "words are found in other forms"
    assert search(database, "zebra", 2) == []


def test_equal_passages_make_equal_beginnings() -> None:
    database = index([_STEP, _LEASE])
    first, second = (search(database, text, 2) for text in ("lease and budget", "budget and lease"))
    assert first == second == [_STEP, _LEASE]
    prompts = [conversation(question, first) for question in ("What is a lease?", "What is a step?")]
    assert prompts[0][0] == prompts[1][0]
    assert prompts[0][-1] == {"role": "user", "content": "What is a lease?"}
