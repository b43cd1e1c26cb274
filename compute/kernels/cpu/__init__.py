"""Kernels for the CPU: compiled by numba at load, run on torch's own threads.

jit.py     pointers, bfloat16, exp and what else the kernels share
rows.py    norms and the activation        rope.py     rotation and the write into slots
decode.py  one query per sequence          prefill.py  a chunk of queries of one sequence
kernels.py the interface: checks, then one call
"""

from compute.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
