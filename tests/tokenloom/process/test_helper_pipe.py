"""The end of the pipe in a helper process."""

import socket
import subprocess
import sys

import pytest

from tokenloom.process.helper_pipe import LENGTH

HELPER = """
import sys
from tokenloom.process import helper_pipe
question = helper_pipe.read_message()
sys.stdin.buffer.read()  # until the parent has ended
helper_pipe.write_message(question * 1000)
"""


def test_a_helper_whose_parent_was_killed_ends_without_a_traceback() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, "-c", HELPER], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE
        )
    ours.sendall(LENGTH.pack(1) + b"x")
    ours.close()
    assert (helper.communicate()[1], helper.returncode) == (b"", 0)


READER = """
import socket, sys
from tokenloom.process import helper_pipe
pipe = socket.socket(fileno=0)
with_files = sys.argv[1] == "files"
read = (lambda: helper_pipe.read_message_with_files(pipe)) if with_files else helper_pipe.read_message
while (message := read()) is not None:
    assert len(message[0] if with_files else message) == 1, message
    helper_pipe.write_message(b"an answer")
"""


@pytest.mark.parametrize("kind", ["bytes", "files"])
@pytest.mark.parametrize(
    ("sent", "is_answered"),
    [(LENGTH.pack(9), False), (LENGTH.pack(9) + b"half", False), (LENGTH.pack(1) + b"x", True), (b"\0", False)],
)
def test_a_parent_that_is_killed_within_a_message_or_before_it_reads_the_answer_leaves_none(
    kind: str, sent: bytes, is_answered: bool
) -> None:
    """No traceback, of a message that cannot be decoded either. The kernel resets a connection whose other end has not
    read all of it."""
    ours, theirs = socket.socketpair()
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, "-c", READER, kind], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE
        )
    ours.sendall(sent)
    if is_answered:
        ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert (helper.communicate()[1], helper.returncode) == (b"", 0)
