"""`slipstream bench chaos`: kill a stack's processes while it serves, and compare its answers with
those of an undisturbed run.

`chaos_workload` draws the requests. Client processes (`client_process`, `http_process`), which
`clients` starts, send them and write what arrives into a `journal`. `fault_injector` kills
processes as `schedule` says. `compare` checks the journals against the undisturbed run, for a real
model also against `reference_model`; `chaos_report` prints the result. `chaos_run` does all of
this, `chaos` is the command, and `chaos_series` runs it for every kind of fault.
"""
