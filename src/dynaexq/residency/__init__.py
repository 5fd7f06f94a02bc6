"""Which version of each expert sits where: budget, blocks, handles."""

from dynaexq.residency.arena import VersionSource
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import HandleWords
from dynaexq.residency.pool import BlockPool
from dynaexq.residency.resident import ResidentExperts

__all__ = [
    "BlockPool",
    "BudgetTracker",
    "HandleWords",
    "ResidentExperts",
    "VersionSource",
]
