"""Which commands a page asks its readers to type, and what the check of them does with each."""

import re

import pytest

from tests.docs.check_console import NOT_TYPED, reason_against
from tests.docs.console_blocks import PAGES, commands_of, read_commands

PAGE = """# Title

```console
$ first \\
    --more
printed {
$ curl -d '{
    "a": 1}'
{"b": 2}
```

```bash
$ no console
```

```console
$ last
```

```
printed by the last
```

```
no output
```
"""


def test_commands_go_on_after_a_backslash_and_within_quotes() -> None:
    found = [(each.line, each.text, each.printed) for each in commands_of("p", PAGE)]
    assert found == [
        (4, "first \\\n    --more", ["printed {"]),
        (7, "curl -d '{\n    \"a\": 1}'", ['{"b": 2}']),
        (17, "last", ["printed by the last"]),
    ]


@pytest.mark.parametrize("page", PAGES)
def test_most_commands_of_a_page_are_typed(page: str) -> None:
    commands = read_commands(page)
    assert [each for each in commands if reason_against(each, quick=False) is None]
    assert [each for each in commands if reason_against(each, quick=True) is None]


def test_every_reason_is_that_of_a_command() -> None:
    texts = [each.text for page in PAGES for each in read_commands(page)]
    for pattern in NOT_TYPED:
        assert any(re.search(pattern, text) for text in texts), pattern


def test_no_page_installs_from_an_index_what_no_index_has() -> None:
    for page in PAGES:
        for each in read_commands(page):
            assert not re.search(r"pip install '?tokenloom", each.text), each.place
