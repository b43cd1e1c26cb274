"""The kvstore's binary over a fake CUDA: `python -m tests.fake_cuda_kvstore FOLDER --OPTION …`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from kvstore.fake_cuda import FakeCuda
from services.common import binary, config
from services.kvstore.__main__ import serve


def main(folder: str, arguments: list[str]) -> int:
    settings = config.load(config.KvStoreSettings, "serve-kvstore", arguments)
    connect = functools.partial(FakeCuda, Path(folder))
    return binary.run("kvstore", settings, functools.partial(serve, connect=connect))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
