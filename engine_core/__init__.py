"""The engine core: requests, scheduler, KV cache manager and the loop that joins them.

Knows no tensor library and no network but its own ZMQ sockets: ``gpu_worker`` fulfils the protocols of
:mod:`tokenloom.engine_core.worker`, ``services/engine`` and ``tokenloom/offline/llm.py`` join the two.
"""
