"""Kernels for GPUs, written in Triton: one file each, with its wrapper.

rope_write_kv.py   norm, rotation and the write into slots
paged_decode.py    one query per sequence        paged_prefill.py  chunks of many sequences
attention.py       the online softmax of both    elements.py       quantized KV
copy_blocks.py     blocks within a pool          gather_blocks.py  into and out of a buffer
norms.py, activations.py, sampling.py, int8_linear.py
kernels.py         the interface                 checks.py         what the wrappers refuse
launch.py          plans of launches             tuning.py         which configuration

docs/kernels.md derives the arithmetic and says what limits each kernel.
"""

from compute.kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
