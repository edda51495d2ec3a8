"""Output that must be something: grammars compiled beside the loop, followed token by token, told to the worker as
bitmasks. Backends are behind :mod:`.backend` and loaded when the first request needs one."""
