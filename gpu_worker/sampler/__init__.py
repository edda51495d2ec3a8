"""Turns the logits of a step into tokens and log probabilities.

One rule, ``host/sampler.py``, is written three times: there in numpy, in C++ for rows on a CPU that need nothing but a
token (``kernels/csrc/draw.cpp``), and for GPUs (``kernels/triton/sample.py``). ``step_sampler.py`` chooses one for a
step.
"""
