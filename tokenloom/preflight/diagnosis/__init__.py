"""Examines a machine for ``tokenloom doctor``: each function returns findings and changes nothing."""
