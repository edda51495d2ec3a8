"""Print figures about the source tree: sizes, the road of a request, shared parameters, imports, unresolved names.

Run it as ``python tools/house.py`` in a checkout; ``--help`` lists the options.
"""

from figures.command import main

if __name__ == "__main__":
    raise SystemExit(main())
