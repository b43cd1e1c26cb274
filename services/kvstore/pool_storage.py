"""Where a kvstore's pool is, from settings."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.attachment import ManagerOptions
from kvstore.cuda_pool import CudaStorage
from kvstore.ports import CudaRuntime
from kvstore.posix_pool import PosixStorage, check_room, sweep
from services.common.config import KvStoreSettings
from services.common.option_values import device_number
from services.common.startup import StartupError


def find(
    settings: KvStoreSettings, connect: Callable[[], CudaRuntime]
) -> CudaStorage | PosixStorage:
    """The storage that `--device` names. `connect` is called if it is a CUDA device.

    Raises StartupError, CudaUnavailable.
    """
    device = device_number(settings.device)
    if device is None:
        return PosixStorage(settings.listen if settings.recover else "")
    if settings.keep_pool:
        raise StartupError(
            f"--keep-pool: a pool on {settings.device} ends with its kvstore; use --no-keep-pool, "
            "or --device cpu"
        )
    return CudaStorage(connect(), device)


def check(storage: CudaStorage | PosixStorage, options: ManagerOptions) -> None:
    """Sweep leftovers, and raise NoRoomForPool if the pool would not fit now.

    The pool comes with the first attachment, long after whoever starts us could be told.
    """
    sweep()
    if isinstance(storage, CudaStorage):
        storage.check_room(options.kv_memory_bytes)
        check_room(options.host_memory_bytes)
    else:
        check_room(options.kv_memory_bytes + options.host_memory_bytes)
