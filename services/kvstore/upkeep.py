"""What a kvstore does between calls: leases that lapse, and audits while it is idle."""

from __future__ import annotations

import asyncio
import time

import structlog

from kvstore.manager import PageManager

_log = structlog.get_logger()

_PERIOD_SECONDS = 1.0


class Upkeep:
    """Looks after a page manager from time to time.

    An audit holds up calls, so it waits until there have been none for a while, and until
    something has changed since the last one.
    """

    def __init__(self, manager: PageManager, audit_after: float) -> None:
        """`audit_after`: seconds without a call; 0: no audits."""
        self._manager = manager
        self._audit_after = audit_after
        self._seen = self._audited = manager.num_changes
        self._since = time.monotonic()
        self._is_whole = True

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            self.look()

    def look(self) -> None:
        """One look."""
        self._manager.keep()
        self._tell_of_the_journal(self._manager.stats().is_journal_whole)
        now, changes = time.monotonic(), self._manager.num_changes
        if changes != self._seen:
            self._seen, self._since = changes, now
        is_idle = self._audit_after and now - self._since >= self._audit_after
        if is_idle and changes != self._audited:
            self._audited = changes
            for finding in self._manager.audit():
                _log.error("audit", kind=finding.kind, finding=finding.text)

    def _tell_of_the_journal(self, is_whole: bool) -> None:
        if is_whole != self._is_whole:
            self._is_whole = is_whole
            if is_whole:
                _log.info("journal", outcome="it is whole again")
            else:
                _log.error("journal", outcome="no room in shared memory: a kill loses everything")
