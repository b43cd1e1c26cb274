"""What becomes of a driver's things when its lease ends."""

from __future__ import annotations

from kvstore import pinning
from kvstore.state import PoolState


def change_hands(state: PoolState, epoch: int, *, adopt: bool) -> int:
    """Let the lease of this epoch begin (0: none). How many sequences were closed.

    What earlier drivers have left open is closed, and their pins end; or, with `adopt`, it
    is the new driver's. Copies that were to be run never are.
    """
    state.blocks.host.abandon()
    left = [one for one in state.sequences.values() if one.epoch]
    if not adopt:
        state.close(left)
        pinning.unpin(state, lambda pin: pin.epoch != 0)
    # Last, and in one record: whenever we are killed, nothing is left that belongs to
    # another lease than the one on paper.
    state.epoch = epoch
    state.journal.epoch(epoch)
    if not adopt:
        return len(left)
    for one in left:
        one.epoch = epoch
    for pin in state.pins.all():
        pin.epoch = epoch if pin.epoch else 0
    return 0
