"""The Compose file against the Containerfile, Prometheus' files, and the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.patience import PATIENCE_S

from slipstream.cli.serving.serve import DEFAULT_HTTP_PORT
from slipstream.http.admin.metrics import _FAMILIES
from slipstream.http.endpoints import openapi
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE

DEPLOY = Path(__file__).parents[3] / "scripts" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
PROMETHEUS_PORT, GRAFANA_PORT = 9090, 3000  # where their images listen


def mounts(service: str) -> dict[str, str]:
    """What is mounted, by where."""
    pairs = [volume.split(":")[:2] for volume in SERVICES[service].get("volumes", ())]
    return {target: source for source, target in pairs}


def test_what_it_builds_and_mounts_is_there() -> None:
    build = SERVICES["slipstream"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert (context / "pyproject.toml").is_file()
    assert (context / build["dockerfile"]).samefile(DEPLOY / "Containerfile")
    named = {source for service in SERVICES for source in mounts(service).values()}
    files = {source for source in named if source.startswith(".")}
    assert not [source for source in files if not (DEPLOY / source).is_file()]
    assert named - files == set(COMPOSE["volumes"])
    used = [each["source"] for each in SERVICES["grafana"]["configs"]]
    assert used == list(COMPOSE["configs"])


def test_only_this_machine_reaches_its_ports_and_they_are_those_that_are_listened_at() -> None:
    listening = {"slipstream": 8000, "prometheus": PROMETHEUS_PORT, "grafana": GRAFANA_PORT}
    assert listening["slipstream"] == DEFAULT_HTTP_PORT
    assert f"EXPOSE {DEFAULT_HTTP_PORT}" in CONTAINERFILE
    for service, port in listening.items():
        assert SERVICES[service]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_the_server_gets_a_key_time_to_drain_and_folders_that_it_may_write_to() -> None:
    service = SERVICES["slipstream"]
    assert list(service["environment"]) == [API_KEY_VARIABLE]
    assert service["environment"][API_KEY_VARIABLE].startswith(f"${{{API_KEY_VARIABLE}:?")
    [drain_s] = re.findall(r'"--drain-s", "(\d+)"', CONTAINERFILE)
    assert int(service["stop_grace_period"].removesuffix("s")) > int(drain_s) + 10
    [folder] = re.findall(r'"--runtime-dir", "(\S+)"', CONTAINERFILE)
    [uid] = re.findall(r"--uid (\d+)", CONTAINERFILE)
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp", f"{folder}:uid={uid},mode=0700"]
    assert f" {next(iter(mounts('slipstream')))}\n" in CONTAINERFILE  # made for its user


def test_no_password_is_a_default_and_each_image_is_named_by_its_digest() -> None:
    password = SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert password.startswith("${GRAFANA_PASSWORD:?")
    images = {name: each["image"] for name, each in SERVICES.items() if "image" in each}
    images["python"] = SERVICES["slipstream"]["build"]["args"]["PYTHON_IMAGE"]
    defaults = {}
    for name, image in images.items():
        pinned = r"^\$\{(\w+):-(docker\.io/\S+:\S+@sha256:[0-9a-f]{64})\}$"
        [(variable, defaults[name])] = re.findall(pinned, image)
        assert variable == f"{name.upper()}_IMAGE"
    assert (
        f"\nARG PYTHON_IMAGE={defaults['python']}\nFROM $PYTHON_IMAGE AS build\n" in CONTAINERFILE
    )
    stages = re.findall(r"^FROM (.*)$", CONTAINERFILE, re.MULTILINE)
    assert stages == ["$PYTHON_IMAGE AS build", "$PYTHON_IMAGE"]


def test_prometheus_scrapes_the_server() -> None:
    [job] = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"slipstream:{DEFAULT_HTTP_PORT}"]}]
    path = job.get("metrics_path", "/metrics")
    assert not openapi.ENDPOINTS[path].has_key
    rules = "/etc/prometheus/" + PROMETHEUS["rule_files"][0]
    assert {rules, "/etc/prometheus/prometheus.yml"} <= set(mounts("prometheus"))


def test_grafana_asks_prometheus_and_finds_the_dashboard() -> None:
    [source] = yaml.safe_load(COMPOSE["configs"]["datasources"]["content"])["datasources"]
    assert (source["url"], source["type"]) == (f"http://prometheus:{PROMETHEUS_PORT}", "prometheus")
    assert source["isDefault"]
    [provider] = yaml.safe_load(COMPOSE["configs"]["dashboards"]["content"])["providers"]
    [path] = [where for where, what in mounts("grafana").items() if what == "./grafana.json"]
    assert Path(path).parent == Path(provider["options"]["path"])
    variables = json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"]
    assert [each["query"] for each in variables if each["type"] == "datasource"] == ["prometheus"]


def test_alerts_ask_for_metrics_that_there_are() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    asked = {name for rule in rules for name in re.findall(r"slipstream:(\w+)", rule["expr"])}
    families = {family.name for family in _FAMILIES}
    assert len(asked) >= 3
    assert {name.removesuffix("_total") for name in asked} <= families
    [job] = PROMETHEUS["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in rules]
    assert all(rule["annotations"]["summary"] for rule in rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_takes_its_files(tmp_path: Path) -> None:
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["promtool", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    done = check("check", "config", str(DEPLOY / "prometheus.yml"))
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS['groups'][0]['rules'])} rules found" in done.stdout
    restarts = 'slipstream:process_restarts_total{process="core", instance="a"}'
    rejected = 'slipstream:requests_rejected_total{code="overloaded", instance="a"}'
    expected = {
        "SlipstreamProcessesRestart": {"process": "core", "instance": "a", "severity": "warning"},
        "SlipstreamOverloaded": {"code": "overloaded", "instance": "a", "severity": "warning"},
        "SlipstreamDown": {"job": "slipstream", "severity": "critical"},
        "SlipstreamProcessDown": {"process": "core", "severity": "critical"},
    }
    case = {
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": restarts, "values": "0+1x20"},
                    {"series": rejected, "values": "0+5x20"},
                    {"series": 'up{job="slipstream"}', "values": "0x20"},
                    {"series": 'slipstream:process_up{process="core"}', "values": "0x20"},
                ],
                "alert_rule_test": [
                    {"eval_time": "20m", "alertname": name, "exp_alerts": [{"exp_labels": labels}]}
                    for name, labels in expected.items()
                ],
            },
            {
                "interval": "1m",
                "input_series": [
                    {"series": restarts, "values": "1x20"},
                    {"series": rejected, "values": "5x20"},
                    {"series": 'up{job="slipstream"}', "values": "1x20"},
                    {"series": 'slipstream:process_up{process="core"}', "values": "1x20"},
                ],
                "alert_rule_test": [
                    {"eval_time": "20m", "alertname": name, "exp_alerts": []} for name in expected
                ],
            },
        ],
    }
    summaries = {
        rule["alert"]: rule["annotations"]["summary"] for rule in ALERTS["groups"][0]["rules"]
    }
    for each in case["tests"][0]["alert_rule_test"]:
        [alert] = each["exp_alerts"]
        text = summaries[each["alertname"]]
        for label in ("process", "instance"):
            text = text.replace(f"{{{{ $labels.{label} }}}}", alert["exp_labels"].get(label, ""))
        alert["exp_annotations"] = {"summary": text.replace("{{ $value }}", "15")}
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump(case))
    done = check("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
