"""Check the first line of a commit message: ``python tools/commit_subject.py FILE`` exits with 1 if it is bad."""

import sys
from collections.abc import Sequence
from pathlib import Path

MAX_LENGTH = 72


def problem(message: str) -> str | None:
    """Return what is wrong with a commit message, or None. Merge commits keep the subject that git gives them."""
    subject, *body = message.splitlines() or [""]
    if subject.startswith("Merge "):
        return None
    if not subject.strip():
        return "the subject is empty; say in the imperative what the commit does"
    if len(subject) > MAX_LENGTH:
        return f"the subject has {len(subject)} characters; shorten it to {MAX_LENGTH} and explain in the body"
    if subject.endswith("."):
        return "the subject ends with a full stop; leave it out"
    if body and body[0].strip():
        return "the second line is not empty; separate subject and body by an empty line"
    return None


def main(arguments: Sequence[str]) -> int:
    """Print the problem of the message in the file, if there is one. Returns the exit status."""
    found = problem(Path(arguments[0]).read_text())
    if found is not None:
        sys.stderr.write(f"commit message: {found}\n")
    return int(found is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
