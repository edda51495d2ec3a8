"""Writes the stubs of the public API for Go and for Node.js: ``make stubs``.

``build/stubs/go`` is a folder for ``GOPATH``; what is below ``src/tokenloom/gen`` can be copied into a module.
``build/stubs/npm`` is the source of the package ``tokenloom-client``, and ``build/stubs/tokenloom-client-….tgz`` what
``npm install`` takes. The Python stubs are in the tree (``make protos``). No stub of another language is committed.
"""
