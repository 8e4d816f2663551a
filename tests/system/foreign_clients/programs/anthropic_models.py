"""anthropic's client lists models page by page, forwards, backwards and by hand."""

from __future__ import annotations

from anthropic import Anthropic
from scenario import KEY, base_url, report

with Anthropic(base_url=base_url(), api_key=KEY, max_retries=0) as client:
    forwards = [each.id for each in client.models.list(limit=2)]
    backwards = [each.id for each in client.models.list(limit=2, before_id=forwards[-1])]
    by_hand = []
    page = client.models.list(limit=1)
    while True:
        by_hand += [each.id for each in page.data]
        if not page.has_more:
            break
        page = client.models.list(limit=1, after_id=page.last_id or "")
    beta = [each.id for each in client.beta.models.list(limit=3)]
    report(forwards=forwards, backwards=backwards, by_hand=by_hand, beta=beta)
