"""Build the wheels of ``dist/`` with nothing but Python, pip and a C++ compiler: ``make wheel``.

Run it as ``python tools/build_wheels.py`` in a checkout; ``--help`` lists the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is built, and not one that is installed

from wheels.command import main

if __name__ == "__main__":
    raise SystemExit(main())
