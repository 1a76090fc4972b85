"""How many failures of user code (rewards, environments) a run bears: a share of a sliding window of samples."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class FailureWindow:
    """Counts failed samples among the last `window`, and remembers why.

    Counts against the whole window from the first sample on, so a run whose every sample fails ends after
    max_fraction * window of them, and a single early failure does not end it.
    """

    def __init__(self, max_fraction: float = 0.5, window: int = 256) -> None:
        self.max_fraction = max_fraction
        self.window = window
        self.failures = 0
        self.total = 0
        self._recent: deque[bool] = deque(maxlen=window)
        self._failed = 0
        self._reasons: Counter[str] = Counter()

    def add(self, reasons: Iterable[str], what: str) -> str:
        """Count samples, each by why it failed ('' when it did not).

        Returns '' or, past the limit, one line with the counts and the commonest reason; `what` names the samples in
        it, e.g. 'rewards'.
        """
        worst = 0
        for reason in reasons:
            if len(self._recent) == self.window:
                self._failed -= self._recent[0]
            self._recent.append(bool(reason))
            self._failed += bool(reason)
            self.failures += bool(reason)
            self.total += 1
            worst = max(worst, self._failed)
            if reason:
                self._note(reason)
        if worst <= self.max_fraction * self.window:
            return ""
        reason, times = self._reasons.most_common(1)[0]
        return (
            f"{worst} of the last {len(self._recent)} {what} failed (limit {self.max_fraction:g} of {self.window}), "
            f"in all {self.failures} of {self.total}; most often ({times} times) {reason}"
        )

    def _note(self, reason: str) -> None:
        """Reasons may differ in every sample: keep the commonest, in bounded memory."""
        if len(self._reasons) >= 256 and reason not in self._reasons:
            self._reasons = Counter(dict(self._reasons.most_common(64)))
        self._reasons[reason] += 1
