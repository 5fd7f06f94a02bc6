"""At which tiers routed traffic ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynaexq.policy.hotness import Scores


@dataclass(frozen=True)
class TierShares:
    """`routed` is the traffic of each layer that ran at each tier, [tiers, layers], from the highest tier down."""

    routed: Scores

    @property
    def by_tier(self) -> list[float]:
        """Shares of all traffic; zeros where there was none."""
        return _share(self.routed.sum(1), float(self.routed.sum()))

    @property
    def raised(self) -> float:
        """Share of all traffic that ran above the lowest tier."""
        return sum(self.by_tier[:-1])

    @property
    def raised_by_layer(self) -> list[float]:
        """The same by layer."""
        return _share(self.routed[:-1].sum(0), np.maximum(self.routed.sum(0), 1))


def _share(part: Scores, whole: Scores | float) -> list[float]:
    shares: list[float] = (part / np.maximum(whole, 1)).tolist()
    return shares
