"""`slipstream bench chaos`: kill a stack's processes while it serves, and look for a difference.

A request's way: `workload` draws it, `follow` asks for it and writes what comes into a `journal`,
in a process of its own (`client_process`, `http_process`) that `clients` starts, `conductor` kills
what `schedule` says when it says, `compare` holds the journals against an undisturbed run
(`reference`; of a real model also against `teacher`), `gaps` measures the pauses, `report` tells.
`volume` is a disk that can be filled, `summary` a table of many runs.
"""
