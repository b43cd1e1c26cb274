"""Errors of compute.

ComputeError
├── InvalidStep         the step contradicts what compute knows; nothing was run
├── PoolUnavailable     no pool to attach, or its memory cannot be mapped
├── LayoutMismatch      the pool does not fit the model
├── ModelNotFound       no such file or folder
├── ModelUnsupported    a family, option or tensor type we cannot run
├── WeightsInvalid      missing, extra or misshaped tensors, a truncated file
├── LogitsNotFinite     broken weights, or a pool that was overwritten
├── ModelLoading        not ready yet
└── DriverBusy          another driver's stream is open
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


class ModelNotFound(ComputeError):
    reason = "MODEL_FILES_NOT_FOUND"


class ModelUnsupported(ComputeError):
    reason = "MODEL_UNSUPPORTED"


class WeightsInvalid(ComputeError):
    reason = "WEIGHTS_INVALID"


class LogitsNotFinite(ComputeError):
    reason = "LOGITS_NOT_FINITE"


class ModelLoading(ComputeError):
    reason = "LOADING"


class DriverBusy(ComputeError):
    reason = "DRIVER_BUSY"
