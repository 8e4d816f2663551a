"""Sums of the counters of all cores of a run, read from a front before each round of faults.

A core's counters end with it: what they counted after the last look is not known, so the sums are
lower bounds.
"""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

COUNTED = {  # metrics, by their names in reports
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
    "cached": "prefix_cache_hits",
    "snapshots": "state_snapshots_loaded",
}
_PREFIX = "slipstream:"
_TIMEOUT_S = 2.0


class CounterSums:
    """Sums over the lives of all cores."""

    def __init__(self, http_address: str | None) -> None:
        """http_address: of a front; None: nothing is known."""
        self._url = None if http_address is None else f"{http_address}/metrics"
        self._last: dict[tuple[str, str], float] = {}  # by metric and labels
        self.counted: dict[str, int] = {}

    def look(self) -> None:
        """Ask the front, if there is one at the moment."""
        if self._url is None:
            return
        try:
            url = self._url  # of this machine
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as page:  # noqa: S310
                text = page.read().decode()
        except OSError:
            return
        self.take(text)

    def take(self, text: str) -> None:
        """Take in a page of metrics."""
        names = {f"{_PREFIX}{metric}": name for name, metric in COUNTED.items()}
        for family in text_string_to_metric_families(text):
            name = names.get(family.name)
            if name is None:
                continue
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                key = (name, str(sorted(sample.labels.items())))
                last = self._last.get(key, 0.0)
                grown = sample.value - last if sample.value >= last else sample.value
                self._last[key] = sample.value
                self.counted[name] = self.counted.get(name, 0) + int(grown)
