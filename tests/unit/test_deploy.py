"""examples/deploy: each file as its own tools and Towline read it. No container is built: that takes a daemon."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import trustme
import yaml

from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.supervisor import DRIVER_STOP_S, GATEWAY_STOP_S
from towline.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
UNITS = ["towline@.service", "towline-gateway@.service"]
#: Where the images' user, the unit's and the files of examples have everything.
STATE, SECRETS = "/var/lib/towline", "/etc/towline/secrets"
#: Seconds that a stop may take (docs/operate.md), and that a service manager gives it.
STOP_S, GRACE_S = 25, 30
#: How exposed a unit may be, in tenths of ``systemd-analyze security``.
EXPOSURE = "20"


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def bridge_of(text: str, place: Path) -> Bridge:
    """A bridge file of an example, with secrets where its own are mounted."""
    authority = trustme.CA()
    server = authority.issue_cert("towline-gateway-0.towline-gateway")
    made = {
        "tls.crt": server.cert_chain_pems[0].bytes(),
        "tls.key": server.private_key_pem.bytes(),
        "ca.crt": authority.cert_pem.bytes(),
    }
    for name in re.findall(rf"{SECRETS}/([\w.]+)", text):
        (place / name).write_bytes(made.get(name, b"0123456789abcdef0123456789abcdef"))
        (place / name).chmod(0o600)
    return parse(text.replace(SECRETS, str(place)), Path("/etc/towline/bridge.toml"), {})


def test_a_stop_fits_into_what_service_managers_give() -> None:
    assert DRIVER_STOP_S + GATEWAY_STOP_S + 2 < STOP_S < GRACE_S


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-gateways.yaml"])
def test_kubernetes_takes_the_resources(name: str, tmp_path: Path) -> None:
    versions = kubernetes_validate.latest_version(), "1.30"
    for resource in resources(name):
        for version in versions:
            kubernetes_validate.validate(resource, version, strict=True)
        for text in resource.get("data", {}).values():
            assert bridge_of(text, tmp_path).state_dir.is_relative_to(STATE)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-gateways.yaml"])
def test_a_pod_is_confined_and_has_the_time_it_takes(name: str) -> None:
    shown = resources(name)
    for stateful in (one for one in shown if one["kind"] == "StatefulSet"):
        pod = stateful["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert stateful["spec"]["replicas"] == 1, "a line is one client id"
        assert pod["terminationGracePeriodSeconds"] >= GRACE_S
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == int(of_dockerfile("USER")[0].partition(":")[0])
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        probes = [container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
        assert probes == ["/healthz", "/readyz"]
        assert container["args"][0] in COMMANDS
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert [place for place, mount in mounts.items() if not mount.get("readOnly")] == [STATE], "one volume"
        services = [one["metadata"]["name"] for one in shown if one["kind"] == "Service"]
        assert stateful["spec"]["serviceName"] in services


def test_compose_is_what_the_specification_says(tmp_path: Path) -> None:
    text = COMPOSE.read_text()
    project = compose_spec.PyCompose.from_yaml(text)
    for what in ("configs", "networks", "secrets", "volumes"):
        getattr(project, f"validate_{what}")()
    services = yaml.safe_load(text)["services"]
    ports = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    towline = services["towline"]
    assert towline["read_only"]
    assert towline["stop_grace_period"] == f"{GRACE_S}s"
    bridge = bridge_of(yaml.safe_load(text)["configs"]["bridge"]["content"], tmp_path)
    assert bridge.state_dir.is_relative_to(STATE)
    assert bridge.kafka.bootstrap_servers == "kafka:9092"
    assert "INSIDE://kafka:9092" in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    with pytest.raises(ValueError, match="read_onlyy"):
        compose_spec.PyCompose.from_yaml(text.replace("read_only:", "read_onlyy:"))


def instructions() -> Iterator[tuple[str, str]]:
    """Of the Dockerfile: word and arguments, continued lines as one."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def of_dockerfile(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_the_image_has_a_user_a_volume_and_a_base_by_its_tag() -> None:
    bases = of_dockerfile("FROM")
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+( AS build)?", base) for base in bases)
    assert of_dockerfile("USER") == ["10001:10001"]
    assert of_dockerfile("VOLUME") == [STATE]
    settings = " ".join(of_dockerfile("ENV"))
    assert f"TMPDIR={STATE}" in settings, "with a read-only root there is no other place"
    assert not re.search(r"https?://|curl|wget", " ".join(rest for _, rest in instructions()))
    (wheel,) = (rest.split()[0] for rest in of_dockerfile("COPY") if not rest.startswith("--from"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wheel == f"dist/{project['name']}-*.whl", "what `python -m build --wheel` makes"
    extras = re.findall(r"\.whl\)\[([\w,]+)\]", " ".join(of_dockerfile("RUN")))
    assert set(extras[0].split(",")) <= project["optional-dependencies"].keys()


@pytest.fixture
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit file whose program is that of this environment."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    place: Path = tmp_path / request.param
    place.write_text((DEPLOY / request.param).read_text().replace("/opt/towline", sys.prefix))
    return place


@pytest.mark.parametrize("unit", UNITS, indirect=True)
def test_systemd_takes_the_unit(unit: Path) -> None:
    for command in (["verify"], ["security", "--offline=yes", f"--threshold={EXPOSURE}"]):
        done = subprocess.run(
            ["systemd-analyze", *command, unit], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout[-300:] + done.stderr
        assert command != ["verify"] or not done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_says_what_its_manager_needs(name: str) -> None:
    settings = dict(re.findall(r"^(\w+)=(.+)$", (DEPLOY / name).read_text(), flags=re.MULTILINE))
    assert settings["Type"] == "notify"
    assert (settings["Restart"], settings["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert int(settings["TimeoutStopSec"]) >= GRACE_S
    assert settings["KillMode"] == "mixed", "its children are ended by it"
    assert settings["ExecStart"].split()[1] in COMMANDS
    assert settings.get("ExecReload", "towline reload").split()[1] in COMMANDS
