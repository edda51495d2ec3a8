"""The end of the pipe in a helper process."""

import socket
import subprocess
import sys

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
        helper = subprocess.Popen([sys.executable, "-c", HELPER], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    ours.sendall(LENGTH.pack(1) + b"x")
    ours.close()
    assert (helper.communicate()[1], helper.returncode) == (b"", 0)
