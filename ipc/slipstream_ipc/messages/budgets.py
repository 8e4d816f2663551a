"""How many bytes messages and their parts may take."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 * 2**20  # no message between client and worker may be larger
# … nor between worker and core, where a registration may hold a whole stream's log-probabilities
MAX_CORE_MESSAGE_BYTES = 256 * 2**20
MESSAGE_BUDGET_BYTES = 2**20  # what a sender that cuts a history into messages aims for
MAX_PARAMS_BYTES = 2**22  # a request's sampling parameters; all limits reached they take less
LOGPROB_BYTES = 8  # a log-probability: its value and its id
