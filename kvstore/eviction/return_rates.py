"""How likely prompts of a kind are to come back, by how long ago they were there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Feature = tuple[str, int]
"""A name and a value. Those named `gap` act differently at each age, others alike at all."""

# Returns that an age or a feature must have had before it counts more than what was assumed.
_AGE_EVIDENCE = 20.0
_FEATURE_EVIDENCE = 1.3
_YOUNGEST_RATE = 0.02  # of the first age, until there is evidence
_FADING = 0.5  # each later age is assumed to return that much less often than the one before
_MOST_RATE = 0.9
# News that are folded in together: few at first, then a part of all there were.
_FIRST_BATCH, _LAST_BATCH, _BATCH_PART = 128, 4096, 8


class ReturnRates:
    """Learns rates of return while it is asked for what they say.

    An age is a half-open interval of the time since the last use. The part of what is there
    when an age begins that comes back before it ends is the age's rate, times a factor for
    each feature. A factor is what was seen over what would have been expected without it,
    both counted as they come, so that nothing is stored but two sums per feature; little
    evidence leaves it near 1. (A proportional hazards model, Cox 1972, in discrete time.)
    """

    def __init__(self, edges: Sequence[int]) -> None:
        """`edges` are where ages begin and end, from 0 on; the last one does not end."""
        self._widths = [end - start for start, end in pairwise(edges)]
        num_ages = len(self._widths)
        self._seen, self._exposed = [0.0] * num_ages, [0.0] * num_ages
        self._rates = [0.0] * num_ages
        self._factors: dict[object, list[float]] = {}  # what was seen, what was expected
        self._news: dict[tuple[tuple[Feature, ...], int], list[float]] = {}
        self._num_news = self._num_learned = 0
        self._batch = _FIRST_BATCH
        self._densities: dict[tuple[Feature, ...], list[float]] = {}
        self._set_rates()

    def learn(
        self, features: tuple[Feature, ...], age: int, exposed: float, returned: float
    ) -> None:
        """Of what was `exposed` in this age, this much `returned`."""
        if age >= len(self._widths):
            return
        cell = self._news.get((features, age))
        if cell is None:
            self._news[features, age] = [returned, exposed]
        else:
            cell[0] += returned
            cell[1] += exposed
        self._num_news += 1
        if self._num_news >= self._batch:
            self._fold()

    def densities(self, features: tuple[Feature, ...]) -> list[float]:
        """For each age: returns per block and unit of time that it is kept for them.

        It is the best over all ages until which it could be kept, as in the hit density of
        Beckmann et al. 2018, LHD (NSDI '18), and 0 for the last age.
        """
        found = self._densities.get(features)
        if found is None:
            found = self._densities[features] = self._compute(features)
        return found

    def _compute(self, features: tuple[Feature, ...]) -> list[float]:
        rates = self._rates_of(features)
        densities = [0.0]
        # From the last age back: `returns` and `time` are those of the best way to go on.
        returns = time = 0.0
        for rate, width in zip(reversed(rates), reversed(self._widths), strict=True):
            here = width * (1 - rate / 2)
            stays = 1 - rate
            # Going on is worth it if it raises the density of stopping after this age.
            if time and returns / time > rate / here:
                returns, time = rate + stays * returns, here + stays * time
            else:
                returns, time = rate, here
            densities.append(returns / time)
        densities.reverse()
        return densities

    def _rates_of(self, features: tuple[Feature, ...]) -> list[float]:
        factor = 1.0
        for feature in features:
            if feature[0] != "gap":
                factor *= self._factor(feature, 0)
        rates = [rate * factor for rate in self._rates]
        for feature in features:
            if feature[0] == "gap":
                rates = [r * self._factor(feature, age) for age, r in enumerate(rates)]
        return [min(_MOST_RATE, rate) for rate in rates]

    def _factor(self, feature: Feature, age: int) -> float:
        sums = self._factors.get(_key(feature, age))
        if sums is None:
            return 1.0
        return (sums[0] + _FEATURE_EVIDENCE) / (sums[1] + _FEATURE_EVIDENCE)

    def _fold(self) -> None:
        """Let the batch of news change the sums."""
        for (features, age), (returned, exposed) in self._news.items():
            factors = [self._factor(feature, age) for feature in features]
            rate = self._rates[age]
            for factor in factors:
                rate *= factor
            expected = min(_MOST_RATE, rate) * exposed
            self._seen[age] += returned
            self._exposed[age] += exposed
            for feature, factor in zip(features, factors, strict=True):
                sums = self._factors.setdefault(_key(feature, age), [0.0, 0.0])
                sums[0] += returned
                sums[1] += expected / factor
        self._num_learned += self._num_news
        self._batch = min(_LAST_BATCH, max(_FIRST_BATCH, self._num_learned // _BATCH_PART))
        self._news.clear()
        self._num_news = 0
        self._densities.clear()
        self._set_rates()

    def _set_rates(self) -> None:
        rate = _YOUNGEST_RATE
        for age, (seen, exposed) in enumerate(zip(self._seen, self._exposed, strict=True)):
            rate = (seen + _AGE_EVIDENCE * _FADING * rate) / (exposed + _AGE_EVIDENCE)
            self._rates[age] = rate


def _key(feature: Feature, age: int) -> object:
    return (feature, age) if feature[0] == "gap" else feature
