"""`slipstream bench chaos`: kill a stack's processes while it serves, and compare its answers with
those of an undisturbed run.

`chaos_workload` draws the requests. `follow` sends each one and writes what arrives into a
`journal`, in a separate process (`client_process`, `http_process`) started by `clients`.
`fault_injector` kills processes as `schedule` says. `compare` checks the journals against the
undisturbed run (`reference`; for a real model also `reference_model`), `gaps` measures the pauses,
and `chaos_report` prints the result. `volume` is a disk that can be filled, `chaos_summary` a table
of many runs.
"""
