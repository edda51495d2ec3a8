"""Builds the wheels of a release.

There are three kinds, and no path is in two that are installed together:

- ``tokenloom_client-…-py3-none-any.whl``: the gRPC client and the stubs, for every platform;
- ``tokenloom-…-py3-none-manylinux_…_x86_64.whl``: everything else, with the kernels that were built ahead for this kind
  of machine; another one for aarch64 where a cross compiler is installed;
- ``tokenloom-…-py3-none-any.whl``: the same without kernels.

The tag of the second names the glibc that its kernels need, which is read from their symbols.
"""
