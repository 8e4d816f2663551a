"""The Kubernetes manifests against the API's schemas, the commands they run, and each other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port
from tests.helpers.processes import started

from slipstream.cli.keys import add_rank, make_folder
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import given_settings
from slipstream.cli.serving.route import add_route
from slipstream.cli.serving.serve import DEFAULT_HTTP_PORT, add_serve
from slipstream.demo_model import MODEL_PATH
from slipstream.http.admin.metrics import _FAMILIES, PREFIX
from slipstream.http.endpoints import openapi
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE
from slipstream.stack.plan.node_plan import plan_node
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import StackSettings, settings_from

DEPLOY = Path(__file__).parents[3] / "scripts" / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    each for path in FILES for each in yaml.safe_load_all(path.read_text())
]
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
VERSIONS = ("1.30", "1.34", "1.37")
GROUPS = "LeaderWorkerSet"  # not of Kubernetes itself
# what of its API is used: a small schema of our own, which has not been held against the API
GROUPS_SCHEMA = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": GROUPS},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate", "size"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object", "required": ["spec"]},
                        "workerTemplate": {"type": "object", "required": ["spec"]},
                    },
                },
            },
        },
    },
}
ENDS_S = 20  # after a drain; a supervisor takes at most 14


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = named("Deployment", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    return dict(found)


PODS = ("slipstream-replica", "slipstream-router")


def words_of(has: dict[str, Any]) -> list[str]:
    """The command that a container runs."""
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    return [*has.get("command", entry), *has["args"]]


def options(name: str) -> Any:
    """What our parser makes of the arguments that a deployment's container runs."""
    return parsed(words_of(container(name)))


def parsed(words: list[str]) -> Any:
    assert words[0] == "slipstream"
    parser = Parser(prog="slipstream")
    {"serve": add_serve, "route": add_route}[words[1]](parser)
    return parser.parse_args(words[2:])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "each",
    [each for each in OBJECTS if each["kind"] != GROUPS],
    ids=lambda o: f"{o['kind']}-{o['metadata']['name']}",
)
def test_each_object_is_one_that_kubernetes_knows(each: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_refuses_what_is_misspelt() -> None:
    spec = {**named("Service", "slipstream")["spec"], "selectors": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**named("Service", "slipstream"), "spec": spec}, VERSIONS[0], strict=True
        )


@pytest.mark.parametrize("name", PODS)
def test_every_selector_finds_its_pods(name: str) -> None:
    deployment = named("Deployment", name)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == {"app": name}
    [spread] = pod(name)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels
    assert named("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels
    target = named("HorizontalPodAutoscaler", name)["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    service = {PODS[0]: "slipstream-replicas", PODS[1]: "slipstream"}[name]
    assert named("Service", service)["spec"]["selector"] == labels
    policy = named("NetworkPolicy", PODS[0])["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app": PODS[0]}
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {"app": PODS[1]}


def test_ports_are_those_that_are_listened_at() -> None:
    replica, router = map(options, PODS)
    [service] = named("Service", "slipstream-replicas")["spec"]["ports"]
    assert replica.listen == f"tcp://0.0.0.0:{service['port']}"
    assert router.addresses == [f"dns://slipstream-replicas:{service['port']}"]
    assert int(router.http_port) == DEFAULT_HTTP_PORT
    ports = {
        name: {each["name"]: each["containerPort"] for each in container(name)["ports"]}
        for name in PODS
    }
    assert ports == {
        PODS[0]: {"streams": service["port"], "http": DEFAULT_HTTP_PORT},
        PODS[1]: {"http": DEFAULT_HTTP_PORT},
    }
    [http] = named("Service", "slipstream")["spec"]["ports"]
    assert http["targetPort"] in ports[PODS[1]]
    let_in = [
        port["port"]
        for rule in named("NetworkPolicy", PODS[0])["spec"]["ingress"]
        for port in rule["ports"]
    ]
    assert let_in == list(ports[PODS[0]].values())


@pytest.mark.parametrize("name", PODS)
def test_probes_ask_what_there_is(name: str) -> None:
    probes = {
        kind: container(name)[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")
    }
    assert probes["livenessProbe"] == {"path": "/health", "port": "http"}
    assert probes["readinessProbe"] == {"path": "/ready", "port": "http"}
    assert {each["path"] for each in probes.values()} <= openapi.ENDPOINTS.keys()


@pytest.mark.parametrize("name", PODS)
def test_a_pod_may_drain_and_write_where_it_has_to(name: str) -> None:
    given, has, spec = options(name), container(name), pod(name)
    pause_s = 5 if "lifecycle" in has else 0
    least_s = pause_s + float(given.drain_s) + ENDS_S
    assert spec["terminationGracePeriodSeconds"] >= least_s
    mounts = {each["mountPath"]: each["name"] for each in has["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert has["securityContext"]["readOnlyRootFilesystem"]
    for path in (str(Path(given.runtime_dir).parent), "/tmp", "/home/slipstream/.cache"):
        assert "emptyDir" in volumes[mounts[path]]
    assert f"--uid {spec['securityContext']['runAsUser']} " in CONTAINERFILE
    secret = volumes[mounts[given.keys]]["secret"]
    assert secret["defaultMode"] == 0o440
    [key] = has["env"]
    assert key["name"] == API_KEY_VARIABLE


def test_the_guide_makes_the_secrets_that_are_named() -> None:
    guide = (DEPLOY.parents[1] / "docs" / "deploying.md").read_text()
    made = set(re.findall(r"create secret generic (\S+)", guide))
    volumes = [each for name in PODS for each in pod(name)["volumes"]]
    for role in ("leader", "worker"):
        volumes += group()[f"{role}Template"]["spec"]["volumes"]
    used = {each["secret"]["secretName"] for each in volumes if "secret" in each}
    used |= {
        each["valueFrom"]["secretKeyRef"]["name"]
        for name in PODS
        for each in container(name)["env"]
    }
    assert made == used


def test_no_pod_has_a_secret_key_of_another_kind() -> None:
    """A rank's pod speaks as no tenant, and a router's sees no plan."""
    guide = (DEPLOY.parents[1] / "docs" / "deploying.md").read_text()
    files = {
        name: set(re.findall(r"--from-file=(\S+)", rest))
        for name, rest in re.findall(r"create secret generic (\S+)(.*)", guide)
    }
    assert files["slipstream-server-keys"] == {
        "keys/server.key_secret",
        "keys/route.front.key",
        "keys/pods.rank.key",
    }
    assert files["slipstream-rank-keys"] == {"keys/server.key", "keys/pods.rank.key_secret"}
    assert files["slipstream-client-keys"] == {
        "keys/server.key",
        "client.key_secret=keys/route.front.key_secret",
    }


def test_replicas_are_added_at_three_quarters_of_what_they_run() -> None:
    [metric] = named("HorizontalPodAutoscaler", PODS[0])["spec"]["metrics"]
    target = metric["pods"]["target"]["averageValue"]
    assert int(target) == 0.75 * int(options(PODS[0]).max_num_seqs)
    rule = (DEPLOY / "kubernetes" / "autoscaling.yaml").read_text()
    assert f"as: {metric['pods']['metric']['name']}}}" in rule
    named_in_rule = set(re.findall(rf"{PREFIX}(\w+)", rule))
    assert named_in_rule
    assert named_in_rule <= {family.name for family in _FAMILIES}


# ---- one model over the pods of a group --------------------------------------------------------


def group() -> dict[str, Any]:
    template: dict[str, Any] = named(GROUPS, "slipstream-ranks")["spec"]["leaderWorkerTemplate"]
    return template


def of_group(role: str) -> Any:
    """What our parser makes of a pod's arguments, with the variables that the API sets."""
    sets = {
        "$(LWS_GROUP_SIZE)": str(group()["size"]),
        "$(LWS_WORKER_INDEX)": "1",
        "$(LWS_LEADER_ADDRESS)": "slipstream-ranks-0.slipstream-ranks.default",
        "$(POD_IP)": "10.0.0.5",
    }
    [has] = group()[f"{role}Template"]["spec"]["containers"]
    words = words_of(has)
    for name, value in sets.items():
        words = [word.replace(name, value) for word in words]
    assert not [word for word in words if "$(" in word]
    return parsed(words)


def test_a_group_has_the_form_that_we_know_of() -> None:
    jsonschema.validate(named(GROUPS, "slipstream-ranks"), GROUPS_SCHEMA)
    assert group()["restartPolicy"] == "RecreateGroupOnPodRestart"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["leader", "worker"])
def test_the_pods_of_a_group_are_ones_that_kubernetes_knows(role: str, version: str) -> None:
    template = group()[f"{role}Template"]
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}}
    kubernetes_validate.validate({**pods, "template": template}, version, strict=True)


def test_the_machines_of_a_group_agree(tmp_path: Path) -> None:
    leader, worker = of_group("leader"), of_group("worker")
    for name in ("model", "tensor_parallel_size", "nnodes", "master_port"):
        assert getattr(leader, name, None) == getattr(worker, name, None)
    assert int(leader.nnodes) == group()["size"]
    folders = {}
    for role in ("server", "rank"):  # as the guide makes the Secrets
        folders[role] = tmp_path / role
        make_folder(folders[role])
        add_rank(folders[role], "pods")
    lead = settings_from(
        {**given_settings(leader), "model": str(MODEL_PATH), "keys": str(folders["server"])}
    )
    work = settings_from(
        {**given_settings(worker), "model": str(MODEL_PATH), "keys": str(folders["rank"])}
    )
    assert plan_stack(lead, tmp_path).children[0].name == "core"
    assert [child.name for child in plan_node(work, tmp_path).children] == ["rank-1"]


def test_a_group_is_found_and_lets_in_its_own_pods_and_routers() -> None:
    labels = {
        role: group()[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker")
    }
    service = named("Service", "slipstream-ranks")["spec"]
    assert service["selector"] == labels["leader"]
    assert of_group("leader").listen == f"tcp://0.0.0.0:{service['ports'][0]['port']}"
    policy = named("NetworkPolicy", "slipstream-ranks")["spec"]
    shared = {"app": labels["worker"]["app"]}
    assert policy["podSelector"]["matchLabels"] == shared
    own, routers, http = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": shared}}]}, "on all ports"
    assert routers["from"][0]["podSelector"]["matchLabels"] == {"app": PODS[1]}
    assert [each["ports"][0]["port"] for each in (routers, http)] == [7001, DEFAULT_HTTP_PORT]
    [has] = group()["leaderTemplate"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in has["ports"]}
    assert ports == {
        "streams": 7001,
        "http": DEFAULT_HTTP_PORT,
        "ranks": StackSettings().master_port,
    }
    for role in ("leader", "worker"):
        spec = group()[f"{role}Template"]["spec"]
        [has] = spec["containers"]
        mounts = {each["mountPath"]: each["name"] for each in has["volumeMounts"]}
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert set(mounts.values()) == set(volumes)
        given = of_group(role)
        secret = volumes[mounts[given.keys]]["secret"]["secretName"]
        assert secret == f"slipstream-{'server' if role == 'leader' else 'rank'}-keys"
        assert "emptyDir" in volumes[mounts[str(Path(given.runtime_dir).parent)]]


@pytest.mark.process
def test_the_commands_serve_and_end_at_sigterm(tmp_path: Path) -> None:
    """As in a pod, but for the model, the paths and the ports."""
    keys, http, streams = tmp_path / "keys", free_port(), free_port()
    make_folder(keys)
    simulated = f"simulated:step_ms=1,tokenizer={MODEL_PATH}"
    here = {
        "Qwen/Qwen3-0.6B": simulated,
        "tcp://0.0.0.0:7001": f"tcp://127.0.0.1:{streams}",
        "dns://slipstream-replicas:7001": f"tcp://127.0.0.1:{streams}",
        "/etc/slipstream/keys": str(keys),
        "/run/slipstream": str(tmp_path),
        "0.0.0.0": "127.0.0.1",
        "--port=8000": f"--port={http}",
    }

    def command(name: str, *more: str) -> list[str]:
        words = [*words_of(container(name)), *more]
        for old, new in here.items():
            words = [word.replace(old, new) for word in words]
        return [sys.executable, "-m", "slipstream.cli.main", *words[1:]]

    run = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, API_KEY_VARIABLE: "k"}}
    replica_command = command(PODS[0], f"--port={free_port()}", "--num-blocks=1000")
    with (
        started(replica_command, **run) as replica,
        started(command(PODS[1]), **run) as router,
    ):
        for process in (replica, router):
            read_until(process, "serving at")
        asked = urllib.request.Request(
            f"http://127.0.0.1:{http}/v1/completions",
            b'{"prompt": "In Python,", "max_tokens": 5}',
            {"Content-Type": "application/json", "Authorization": "Bearer k"},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 5
        for process in (router, replica):
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0


def read_until(process: subprocess.Popen[str], start: str) -> None:
    """Read lines until one begins so."""
    assert process.stdout is not None
    with watchdog(process):
        assert any(line.startswith(start) for line in process.stdout)


@contextmanager
def watchdog(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that says nothing, so that reading from it ends."""
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
