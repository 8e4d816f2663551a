"""The sizes in bytes that messages and their parts may have."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 * 2**20  # a message between client and worker
# a message between worker and core; a registration may hold all log-probabilities of a stream
MAX_CORE_MESSAGE_BYTES = 256 * 2**20
MESSAGE_BUDGET_BYTES = 2**20  # target size when a history is split into messages
MAX_PARAMS_BYTES = 2**22  # a request's sampling parameters; more than their limits allow to fill
LOGPROB_BYTES = 8  # a log-probability: its value and its token id
