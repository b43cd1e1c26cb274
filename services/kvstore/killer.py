"""Dying on purpose, so that a test can see what the next process finds.

    QUIRE_TEST_KILL_POINT=journal.commit.after:3 quire serve-kvstore …

kills the process when it is there for the third time.
"""

from __future__ import annotations

import os
import signal

from kvstore.kill_points import KILL_POINTS, Reached, ignore
from services.common.startup import StartupError

KILL_POINT = "QUIRE_TEST_KILL_POINT"


def killer(text: str | None) -> Reached:
    """What to call at every kill point; `text` is POINT or POINT:TIMES, None: never die.

    Raises:
        StartupError: there is no such point.
    """
    if not text:
        return ignore
    wanted, _, times = text.partition(":")
    if wanted not in KILL_POINTS or not (times or "1").isdigit():
        raise StartupError(f"{KILL_POINT}: {text!r} is not one of {', '.join(KILL_POINTS)}")
    left = int(times or "1")

    def reached(point: str) -> None:
        nonlocal left
        if point == wanted:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reached
