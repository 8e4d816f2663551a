"""`slipstream bench chaos`: kill a stack's processes while it serves, and look for a difference.

A request's way: `chaos_workload` draws it, `follow` asks for it and writes what comes into a
`journal`, in a process of its own (`client_process`, `http_process`) that `clients` starts,
`fault_injector` kills what `schedule` says when it says, `compare` holds the journals against an
undisturbed run (`reference`; of a real model also against `reference_model`), `gaps` measures the
pauses, `chaos_report` tells. `volume` is a disk that can be filled,
`chaos_summary` a table of many runs.
"""
