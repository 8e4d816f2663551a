"""llama.cpp's server, from the wheel `xllamacpp`, which runs in its own environment.

python llamacpp_server.py MODEL.gguf PORT SLOTS TOKENS_A_SLOT THREADS
"""

import sys
import time

import xllamacpp


def main() -> None:
    """Serve until the process is ended."""
    model, *sizes = sys.argv[1:]
    port, slots, slot_tokens, threads = map(int, sizes)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.hostnames = ["127.0.0.1"]
    params.n_parallel = slots
    params.n_ctx = slots * slot_tokens
    params.n_batch = 2048
    params.n_ubatch = 512
    params.cont_batching = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.warmup = True
    params.n_threads_http = slots + 16
    params.kv_unified = False
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
