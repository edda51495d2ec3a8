import sys

import msgspec
import pytest

from tests.engine_core.structured_output.helpers import VOCAB_SIZE, config
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError
from tokenloom.engine_core.structured_output.grammar_backends import make_backend
from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend


def test_llguidance_is_what_auto_means() -> None:
    assert isinstance(make_backend(config(), VOCAB_SIZE), LLGuidanceBackend)


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(GrammarError, match=r"tokenloom\[xgrammar\]"):
        make_backend(msgspec.structs.replace(config(), backend="xgrammar"), VOCAB_SIZE)
