"""The check's sections import kernels before the tests of kernels are collected."""

import tests.interpreted_kernels  # noqa: F401
