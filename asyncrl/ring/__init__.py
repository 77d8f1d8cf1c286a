"""The shared-memory sample ring. Start at `asyncrl.ring.ring`."""

from asyncrl.ring.batch import Batch, Record
from asyncrl.ring.group import Group
from asyncrl.ring.ring import Key, Ring, RingStats
from asyncrl.ring.spill import SpillingProducer

__all__ = ["Batch", "Group", "Key", "Record", "Ring", "RingStats", "SpillingProducer"]
