"""Errors of compute.

ComputeError
├── InvalidStep         the step contradicts what compute knows; nothing was run
├── PoolUnavailable     no pool to attach, or its memory cannot be mapped
├── LayoutMismatch      the pool does not fit the model
├── DtypeUnsupported    a type that this device does not compute with
├── CudaUnavailable     no CuPy, no driver or no such device
├── ModelNotFound       no such file or folder
├── ModelUnsupported    a family, option or tensor type we cannot run
├── WeightsInvalid      missing, extra or misshaped tensors, a truncated file
├── ModelLoading        not ready yet
├── DriverBusy          another driver's stream is open
└── CannotDraw          one sequence of a step cannot go on; the others can
    ├── LogitsNotFinite     broken weights, or a pool that was overwritten
    ├── NoTokenAllowed      biases and the grammar leave nothing to draw
    └── GrammarFailed       it cannot be compiled, or does not fit the tokens so far
"""

from __future__ import annotations


class ComputeError(Exception):
    """Base of all errors of this package. `reason` is stable; the text is for people."""

    reason = "COMPUTE_ERROR"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidStep(ComputeError):
    reason = "INVALID_STEP"


class PoolUnavailable(ComputeError):
    reason = "POOL_UNAVAILABLE"


class LayoutMismatch(ComputeError):
    reason = "LAYOUT_MISMATCH"


class DtypeUnsupported(ComputeError):
    reason = "DTYPE_UNSUPPORTED"


class CudaUnavailable(ComputeError):
    reason = "CUDA_UNAVAILABLE"


class ModelNotFound(ComputeError):
    reason = "MODEL_FILES_NOT_FOUND"


class ModelUnsupported(ComputeError):
    reason = "MODEL_UNSUPPORTED"


class WeightsInvalid(ComputeError):
    reason = "WEIGHTS_INVALID"


class ModelLoading(ComputeError):
    reason = "LOADING"


class DriverBusy(ComputeError):
    reason = "DRIVER_BUSY"


class CannotDraw(ComputeError):
    """Met inside a step: it becomes a SequenceFailure, and is not raised."""


class LogitsNotFinite(CannotDraw):
    reason = "LOGITS_NOT_FINITE"


class NoTokenAllowed(CannotDraw):
    reason = "NO_TOKEN_ALLOWED"


class GrammarFailed(CannotDraw):
    reason = "GRAMMAR_FAILED"
