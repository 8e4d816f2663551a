"""The tags with which the messages between client, worker and core begin.

- A tag is used once over all hops, so that a message sent the wrong way is not taken for another.
- Each direction of a hop has ten, and ten more where those were taken.
  PROTOCOL.md documents those of the client's hop: they are stable.
"""

# either way, on every hop
HELLO = 0
WELCOME = 1
REATTACH = 2
ATTACH_REFUSED = 3
PING = 4
STARTING = 5

# client -> worker
SUBMIT = 10
RESUME = 11
ABORT = 12
GOODBYE = 13
LOCATE = 14
INSPECT = 15
TOKENIZE = 16
DETOKENIZE = 17
CANCEL = 18
RECALL = 19
CHANGE_ADAPTER = 80
KNOWS_ADAPTERS = 81
EMBED = 82

# worker -> client
ACCEPTED = 20
REJECTED = 21
DELTAS = 22
UNKNOWN_STREAMS = 23
SUPERSEDED = 24
PROMPT_LOGPROBS = 25
RECALLED = 26
TOKENIZED = 27
DETOKENIZED = 28
CANCELLED = 29
LOCATED = 70
INSPECTED = 71
LOAD = 72
ADAPTER_CHANGED = 73
ADAPTER_LIST = 74
EMBEDDED = 75

# worker -> core
ADMIT = 30
REPORT = 31
WITHDRAW = 32
FORGET = 33
POSITIONS = 34
KEEP = 35
DROP_KEPT = 36
KEPT_IDS = 37
ADAPTER_CHANGE = 38
ARE_ADAPTERS_KNOWN = 39
POOL = 60
DROP_POOL = 61

# core -> worker
ADMITTED = 40
REGISTERED = 41
ADMISSION_REFUSED = 42
STEP = 43
UNKNOWN_TO_CORE = 44
SYNC_DONE = 45
SUSPECTS = 46
COMPUTED_PROMPT_LOGPROBS = 47
FORGOTTEN = 48
FIRST_TOKEN = 49
KEPT = 50
UNKNOWN_KEPT = 51
GAUGE = 52
ADAPTER_OUTCOME = 53
SERVED_ADAPTERS = 54
POOLED = 55
