"""The `tokenloom` command, a module for each subcommand."""

import os
import signal
import sys

if os.path.basename(sys.argv[0]) == "tokenloom" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command handles it, Ctrl-C just ends the process: in the middle of an import it was a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
