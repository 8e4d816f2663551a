"""A front over replicas that have no room: it asks others, and says so when three have none."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream.demo_model import MODEL_PATH

MODEL = f"simulated:step_ms=200,tokenizer={MODEL_PATH}"
NUM_REPLICAS = 3
PATH = "/v1/completions"


@pytest.mark.process
def test_a_full_replica_sends_requests_to_others_and_a_full_fleet_answers_503() -> None:
    with ExitStack() as opened:
        stacks = [
            opened.enter_context(spareless_stack(MODEL, max_num_seqs=1, max_waiting=1))
            for _ in range(NUM_REPLICAS)
        ]
        front = Front(",".join([stack.address for stack in stacks]), is_router=True)
        opened.callback(front.stop)
        raw = opened.enter_context(Raw(front.port))
        patience = Patience()

        def total(name: str, **labels: str) -> float:
            text = raw.get("/metrics?replicas=all").body.decode()
            wanted = [f'{label}="{value}"' for label, value in labels.items()]
            lines = [line for line in text.splitlines() if line.startswith(f"slipstream:{name}{{")]
            found = [line for line in lines if all(each in line for each in wanted)]
            return sum(float(line.rpartition(" ")[2]) for line in found)

        while total("replica_state", state="serving") < NUM_REPLICAS:
            patience.wait("all serve")
        # one conversation: each request prefers the same replica
        body = {"prompt": "Chapter 1", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        readers = []
        for num in range(2 * NUM_REPLICAS):
            readers.append(opened.enter_context(Raw(front.port)))
            readers[-1].post(PATH, body)
            while total("replica_requests_running") + total("replica_requests_waiting") < num + 1:
                patience.wait(f"request {num} runs or waits")
        assert total("replica_requests_running") == NUM_REPLICAS
        raw.post(PATH, {**body, "stream": False})
        refused = raw.read()
        assert refused.status == 503
        assert refused.error["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        # each of the three was asked
        while total("requests_rejected_total", code="overloaded") < NUM_REPLICAS:
            patience.wait("three have refused it")
