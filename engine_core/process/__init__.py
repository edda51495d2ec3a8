"""The process of an engine core: its start, its threads, its sockets and its signals."""
