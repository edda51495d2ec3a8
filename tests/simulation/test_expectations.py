"""Which errors a fault allows."""

import pytest

from tests.simulation.expectations import is_allowed
from tests.simulation.load import Answer
from tests.simulation.plan import Fault, make_plan
from tokenloom.request.errors import Internal

ENGINES = Internal("The engines sent again and again, for this request, what no engine may send.")
TOKENIZERS = Internal("Tokenizers gave again and again what none may give.")
LOST = Internal("Tokenizers were lost again and again while they had the text.")


@pytest.mark.parametrize(
    ("error", "others", "allowed"),
    [
        (ENGINES, ["engine-1"], True),
        (ENGINES, ["tokenizer-1"], False),
        (ENGINES, [], False),
        (TOKENIZERS, ["engine-1"], False),  # no tokenizer lied
        (LOST, ["engine-1"], False),
        (LOST, ["tokenizer-0", "tokenizer-1"], False),
    ],
)
def test_a_liar_excuses_errors_of_its_own_kind_where_it_was_left_alone(
    error: Internal, others: list[str], *, allowed: bool
) -> None:
    happened = [Fault("lie", 0.0, 1.0, "engine-0"), *(Fault("crash", 0.5, 1.0, name) for name in others)]
    answer = Answer(make_plan(0, ("crash",)).asks[0])
    assert is_allowed(error, happened, answer) == allowed
