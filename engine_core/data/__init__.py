"""The plain records of an engine core: configuration, requests, the messages between its parts, and its errors.

No module here imports another folder of the engine core, apart from :mod:`tokenloom.engine_core.wire`, which encodes
messages.
"""
