"""How likely prompts of a kind are to come back, by how long ago they were there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

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


class Kind:
    """Prompts with the same features: what is new of them, and what is known."""

    __slots__ = ("by_age", "densities", "exposed", "is_new", "others", "returned", "version")

    def __init__(self, features: tuple[Feature, ...], num_ages: int) -> None:
        self.by_age = [feature for feature in features if feature[0] == "gap"]
        self.others = [feature for feature in features if feature[0] != "gap"]
        self.exposed, self.returned = [0.0] * num_ages, [0.0] * num_ages
        self.is_new = False
        self.densities: list[float] = []
        self.version = -1  # of the rates that these densities follow from


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
        self._kinds: dict[tuple[Feature, ...], Kind] = {}
        self._news: list[Kind] = []
        self._num_news = self._num_learned = 0
        self._batch = _FIRST_BATCH
        self._version = 0
        self._set_rates()

    def kind(self, features: tuple[Feature, ...]) -> Kind:
        """The prompts with these features."""
        found = self._kinds.get(features)
        if found is None:
            found = self._kinds[features] = Kind(features, len(self._widths))
        return found

    def learn(self, kind: Kind, age: int, exposed: float, returned: float) -> None:
        """Of what was `exposed` in this age, this much `returned`."""
        if age >= len(self._widths):
            return
        kind.exposed[age] += exposed
        kind.returned[age] += returned
        if not kind.is_new:
            kind.is_new = True
            self._news.append(kind)
        self._num_news += 1
        if self._num_news >= self._batch:
            self._fold()

    def densities(self, kind: Kind) -> list[float]:
        """For each age: returns per block and unit of time that it is kept for them.

        It is the best over all ages until which it could be kept, as in the hit density of
        Beckmann et al. 2018, LHD (NSDI '18), and 0 for the last age.
        """
        if kind.version != self._version:
            kind.version = self._version
            kind.densities = self._compute(kind)
        return kind.densities

    def _compute(self, kind: Kind) -> list[float]:
        factor = 1.0
        for feature in kind.others:
            factor *= self._factor(feature)
        densities = [0.0]
        # From the last age back: `returns` and `time` are those of the best way to go on.
        returns = time = 0.0
        for rate, width in zip(
            reversed(self._age_rates(kind)), reversed(self._widths), strict=True
        ):
            part = min(_MOST_RATE, rate * factor)
            here = width * (1 - part / 2)
            # Going on is worth it if it raises the density of stopping after this age.
            if returns * here > part * time:
                returns, time = part + (1 - part) * returns, here + (1 - part) * time
            else:
                returns, time = part, here
            densities.append(returns / time)
        densities.reverse()
        return densities

    def _age_rates(self, kind: Kind) -> list[float]:
        """Rates with the factors that differ between ages."""
        rates = self._rates
        for feature in kind.by_age:
            rates = [r * self._factor((feature, age)) for age, r in enumerate(rates)]
        return rates

    def _factor(self, key: object) -> float:
        sums = self._factors.get(key)
        if sums is None:
            return 1.0
        return (sums[0] + _FEATURE_EVIDENCE) / (sums[1] + _FEATURE_EVIDENCE)

    def _fold(self) -> None:
        """Let the batch of news change the sums."""
        for kind in self._news:
            self._fold_kind(kind)
        self._num_learned += self._num_news
        self._batch = min(_LAST_BATCH, max(_FIRST_BATCH, self._num_learned // _BATCH_PART))
        self._news.clear()
        self._num_news = 0
        self._version += 1
        self._set_rates()

    def _fold_kind(self, kind: Kind) -> None:
        factors = [self._factor(feature) for feature in kind.others]
        product = prod(factors)
        rates = self._age_rates(kind)
        whole_seen = whole_expected = 0.0
        for age, exposed in enumerate(kind.exposed):
            if not exposed:
                continue
            seen = kind.returned[age]
            self._seen[age] += seen
            self._exposed[age] += exposed
            expected = min(_MOST_RATE, rates[age] * product) * exposed
            whole_seen += seen
            whole_expected += expected
            for feature in kind.by_age:
                self._add((feature, age), seen, expected / self._factor((feature, age)))
        for feature, factor in zip(kind.others, factors, strict=True):
            self._add(feature, whole_seen, whole_expected / factor)
        num_ages = len(self._widths)
        kind.exposed, kind.returned = [0.0] * num_ages, [0.0] * num_ages
        kind.is_new = False

    def _add(self, key: object, seen: float, expected: float) -> None:
        sums = self._factors.setdefault(key, [0.0, 0.0])
        sums[0] += seen
        sums[1] += expected

    def _set_rates(self) -> None:
        rate = _YOUNGEST_RATE
        for age, (seen, exposed) in enumerate(zip(self._seen, self._exposed, strict=True)):
            rate = (seen + _AGE_EVIDENCE * _FADING * rate) / (exposed + _AGE_EVIDENCE)
            self._rates[age] = rate
