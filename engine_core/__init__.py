"""The engine core schedules requests, manages the KV cache and runs the loop that steps a worker.

It uses no tensor library and no network except its own ZMQ sockets. ``gpu_worker`` implements the protocols of
:mod:`tokenloom.engine_core.executor.worker`; ``services/engine`` and ``tokenloom/offline/llm.py`` join the two.
"""
