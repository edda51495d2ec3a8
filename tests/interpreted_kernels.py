"""Decorates the Triton kernels for its interpreter, in which tests run them: every folder of tests that import a kernel
imports this first."""

import importlib
import os
import pkgutil

from tokenloom.gpu_worker.kernels import triton as kernels

# tests/conftest.py has imported Triton in the same way.
os.environ["TRITON_INTERPRET"] = "1"
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"{kernels.__name__}.{module.name}")
del os.environ["TRITON_INTERPRET"]  # processes that tests start decide for themselves
