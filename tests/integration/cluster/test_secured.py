"""Long: what executors lack is told, what is shipped runs, Kafka's secrets get there and none shows; shared state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.cluster.test_cluster import ENVIRONMENTS, executors_of, kill, shown_by
from tests.integration.kafka.reading import numbers
from tests.integration.spark.searching import contents, rest_of
from towline import Client, ClientSettings
from towline.net.endpoint import Tls
from towline.spark.executors import REQUIRED_VERSIONS
from towline_prove.devstack.process import free_port
from towline_prove.devstack.secured import USER, SecuredKafka, SecuredMosquitto
from towline_prove.devstack.stack import Stack, StackForm

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
FORM = StackForm(secure=True, spark_workers=2, bare=True, shared=True)
DEVICES = 4


class Secured:
    """A bridge on a stack where everything wants a secret, and a device.

    Attributes:
        ui: The driver's page.
    """

    def __init__(self, place: Path, stack: Stack) -> None:
        assert isinstance(stack.mosquitto, SecuredMosquitto)
        assert isinstance(stack.kafka, SecuredKafka)
        assert stack.spark is not None
        self.place, self.stack, self.cluster = place, stack, stack.spark
        self.mosquitto, self.kafka = stack.mosquitto, stack.kafka
        self.bridge = Running(stack.shared_directory, place / "bridge.toml")  # its state is where executors see it
        self._port = free_port()
        self.ui = f"http://127.0.0.1:{self._port}"
        self.own_files = [
            self.kafka.password_file,
            self.mosquitto.password_file,
            self.cluster.secret_file,
            stack.directory / "gateway" / "token",
        ]

    @property
    def secrets(self) -> list[str]:
        return [file.read_text().strip() for file in self.own_files]

    def write(self, state: Path, kafka_password: Path, shipped: Path | None = None) -> None:
        made = self.mosquitto.certificates
        (self.place / "events").mkdir(exist_ok=True)
        events = {"enabled": "true", "compress": "false", "dir": (self.place / "events").as_uri()}
        conf = {f"spark.eventLog.{name}": value for name, value in events.items()} | {"spark.pyspark.python": PYTHON}
        if shipped is not None:
            conf |= {
                "spark.submit.pyFiles": f"{shipped}/towline.zip",
                "spark.archives": f"{shipped}/site-packages.tar.gz#site-packages",
                "spark.executorEnv.PYTHONPATH": "site-packages",
            }
        gateway, kafka = self.stack.directory / "gateway", self.kafka
        text = f"""
name = "plant"
state_dir = "{state}"
[mqtt]
brokers = ["{self.mosquitto.uri}"]
username = "{USER}"
password_file = "{self.mosquitto.password_file}"
tls = {{ ca_file = "{made.authority}", cert_file = "{made.client}", key_file = "{made.client_key}" }}
[kafka]
bootstrap_servers = "{kafka.bootstrap}"
password_file = "{kafka_password}"
settings = {{ {_table(kafka.settings_of())} }}
create_topics = {{ partitions = 1 }}
[spark]
master = "{self.cluster.master.address}"
secret_file = "{self.cluster.secret_file}"
ui = true
conf = {{ "spark.executor.memory" = "512m", "spark.ui.port" = {self._port}, {_table(conf)} }}
[gateway]
listen = "{self.stack.variables()["STACK_GATEWAY_1"]}"
cert_file = "{gateway}/server.pem"
key_file = "{gateway}/server.key"
ca_file = "{gateway}/authority.pem"
token_file = "{gateway}/token"
[[uplink]]
name = "line"
guarantee = "exactly_once"
parallelism = 2
dedupe = {{ key = "CAST(payload AS STRING)" }}
route = [{{ from = "up/{{device}}", topic = "readings", key = "{{device}}" }}]
"""
        self.bridge.file.write_text(text)

    def ends(self) -> str:
        """What it says that ends by itself, with exit code 2."""
        self.bridge.start()
        assert self.bridge.ended() == 2, self.bridge.out
        said = self.bridge.out
        assert "Traceback" not in said
        (self.bridge.directory / "out").unlink()
        return said

    def publish(self, first: int, count: int) -> None:
        made = self.mosquitto.certificates
        tls = Tls(ca_file=made.authority, cert_file=made.client, key_file=made.client_key)
        settings = ClientSettings(username=USER, password=self.mosquitto.password_file.read_text(), tls=tls)
        with Client(self.mosquitto.uri, client_id="device", settings=settings) as device:
            sent = [device.publish(f"up/d{n % DEVICES}", b"%d" % n, qos=2) for n in range(first, first + count)]
            for each in sent:
                each.result(PATIENCE)

    def arrived(self, received: int) -> None:
        """Wait until so many were received, and nothing waits."""

        def all_of_them() -> bool:
            account = self.bridge.account()
            return (account["received"], account["waiting"]) == (received, 0)

        wait_until(all_of_them, PATIENCE, f"{received} messages")

    def values(self) -> list[int]:
        return numbers(f"127.0.0.1:{self.kafka.ports[2]}", "readings")  # the broker's own way in

    def shown(self) -> dict[str, str]:
        """All that somebody sees who has no file of secrets; by where it is."""
        return {
            **shown_by(self.cluster, self.ui, leaving_out=self.own_files),
            **rest_of(self.ui),
            "the shared state": contents(self.stack.shared_directory),
            "the event log": contents(self.place / "events"),
            "what the bridge said": self.bridge.out,
        }


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``towline.zip`` and ``site-packages.tar.gz``, as docs/spark.md makes them."""
    place = tmp_path_factory.mktemp("ship")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(place), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=300)
    (made,) = place.glob("towline-*.whl")
    shutil.copy(made, place / "towline.zip")
    with tarfile.open(place / "site-packages.tar.gz", "w:gz", compresslevel=1) as archive:
        for name in REQUIRED_VERSIONS:
            found = distribution(name)
            for file in found.files or ():
                if ".." not in file.parts:  # its programs
                    archive.add(str(found.locate_file(file)), arcname=str(file))
    return place


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)  # a session of Spark in this process sets it for all
    with Stack(tmp_path / "stack", form=FORM) as stack:
        one = Secured(tmp_path, stack)
        try:
            yield one
        finally:
            if hasattr(one.bridge, "process") and one.bridge.process.poll() is None:
                one.bridge.interrupt()


def test_packages_and_secrets_get_where_tasks_need_them_and_no_secret_shows(
    secured: Secured, shipped: Path, record_property: Callable[[str, object], None]
) -> None:
    absent = secured.place / "password"
    absent.write_text(secured.kafka.password_file.read_text())
    absent.chmod(0o600)
    secured.write(secured.place / "state", absent)
    (line,) = [one for one in secured.ends().splitlines() if "[TL-S31]" in one]
    assert "towline is missing, pyarrow is missing, confluent-kafka is missing, crc32c is missing" in line
    assert f"the file {absent} can't be read" in line
    assert all(f"executor {number} on " in line for number in (0, 1))

    secured.write(secured.place / "state", secured.kafka.password_file, shipped)
    (line,) = [one for one in secured.ends().splitlines() if "[TL-S31]" in one]
    assert f"it can't read and write {secured.place / 'state'} as the driver does" in line

    state = secured.bridge.directory / "state"
    shutil.move(secured.place / "state", state)
    secured.write(state, secured.kafka.password_file, shipped)
    secured.bridge.start()
    wait_until(secured.bridge.online, PATIENCE, "the gateway")
    secured.publish(0, 400)
    secured.arrived(400)
    first, second = secured.cluster.workers
    kill(executors_of(first)[0])
    secured.publish(300, 300)  # 100 of them are repeats
    secured.arrived(700)
    kill(executors_of(second)[0])
    secured.publish(600, 100)
    secured.arrived(800)
    values = secured.values()
    record_property("messages", 800)
    record_property("repeats", 100)
    record_property("in_kafka", len(values))
    assert sorted(values) == list(range(700))
    for device in range(DEVICES):
        own = [value for value in values if value % DEVICES == device]
        assert own == sorted(own)
    shown = secured.shown()
    record_property("places", len(shown))
    for worker in secured.cluster.workers:  # it was looked for in the right places
        assert any(worker.host in page and "logPage" in page and "stderr" in page for page in shown)
    assert "SparkListenerApplicationStart" in shown["the event log"]
    for place, text in shown.items():
        for file, secret in zip(secured.own_files, secured.secrets, strict=True):
            of_spark = (file, place) == (secured.cluster.secret_file, ENVIRONMENTS)
            assert of_spark or secret not in text, f"what is in {file} shows in {place}"
    assert secured.bridge.interrupt() == 0
    assert all(secret not in contents(secured.place / "events") for secret in secured.secrets)


def _table(settings: dict[str, str]) -> str:
    return ", ".join(f'"{name}" = {json.dumps(value)}' for name, value in settings.items())
