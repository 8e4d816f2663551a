"""vLLM's engine core in place of this project's scheduler and runner.

`vllm_scheduler` and `runner` stand behind the core's loop as `Scheduling` and `TurnRunner`: a step
is the permission for one turn of vLLM's own loop, which runs on a thread. vLLM decides what a turn
computes; streams, their ends, what workers are sent and grammars are the core's as ever.

- vLLM names no end: where it stops computing, it only frees the request's row. An error of one
  request ends that stream.
- A request's id is used once. What is in flight for an id that is gone is dropped.
- Requests begin at the launch of a turn, and end at the start of one.
- What a stream has sampled before is outputs, never a part of its prompt (`resume`).
- A turn that raises ends the core: vLLM's state is unknown then, and the streams are admitted
  again.
"""
