"""`slipstream bench fuzz`: malformed and hostile messages by the million, beside an honest peer.

A stack in one thread (`fuzz_stack`): a real worker and a real core on the simulated model, over
real sockets. Attackers of both hops (`attacker`, `hostile_client`, `hostile_worker`) send valid
messages, and mutations of them (`mutation`), to the worker's socket and to the core's;
`honest_client` is the product's own client, whose streams must not be affected. `fuzz_run` combines
them, and `fuzz` is the command.

With `--requests`, whole requests ask for as much as they may (`hostile_requests`), sent by a client
that keeps to the protocol; `request_run` counts the steps that honest streams wait.
"""
