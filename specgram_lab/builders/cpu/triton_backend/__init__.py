"""A Triton backend named ``cpu``: lets vLLM see Triton on a machine that only has its interpreter.

Triton imports ``compiler`` and ``driver`` of every entry point in the group ``triton.backends`` when
``triton`` is imported, in every process. Nothing here may therefore import torch or vLLM, and the driver
must stay inactive unless the interpreter was asked for (see :mod:`.driver`).
"""
