"""`slipstream bench fuzz`: messages that no honest peer sends, by the million, and an honest peer.

A stack in one thread (`stack`): a real worker and a real core on the simulated model, over real
sockets. Attackers of both hops (`attacker`, `client_attacker`, `worker_attacker`) speak to the
worker's socket and to the core's: valid messages, and what `mutation` makes of them; `honest` is
the product's own client, which streams beside them and must not notice. `run` puts them together,
`result` is what came of it, `command` tells.

With `--requests` it is whole requests that ask for as much as they may (`request_speech`), sent by
a client that keeps to the protocol; `request_run` counts the steps that honest streams wait for.
"""
