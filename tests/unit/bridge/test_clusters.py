"""A bridge file whose master is a cluster: what it has to say, and what its session is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.model import Bridge
from towline.bridge.lines.query import network_location
from towline.bridge.runtime.session import (
    cluster_secret,
    driver_environment,
    session_settings,
)
from towline.errors import ConfigError
from towline.gateway.settings import ListenSettings

CLUSTER = "spark://m1:7077"


def with_spark(place: Path, text: str, base: str = GOOD) -> Bridge:
    return read(f"{base}\n[spark]\n{text}\n", place)


def mistakes(place: Path, text: str, base: str = GOOD) -> str:
    with pytest.raises(ConfigError) as caught:
        with_spark(place, text, base)
    return str(caught.value)


@pytest.mark.parametrize(
    "kafka",
    [
        'password_file = "pw"\nsettings."sasl.mechanism" = "SCRAM-SHA-512"',
        'settings = { "sasl.mechanism" = "PLAIN", "sasl.password" = "${KAFKA_PASSWORD}" }',
        'settings."ssl.ca.location" = "pw"',
    ],
)
def test_kafkas_secrets_dont_travel_for_a_downlink(tmp_path: Path, kafka: str) -> None:
    """Spark's own source would read the topic on executors, with a client that has them in its environment."""
    (tmp_path / "pw").write_text("hunter2")
    secured = GOOD.replace("[kafka]", f"[kafka]\n{kafka}")
    down = f'{secured}\n[[downlink]]\nname = "commands"\nfrom = "commands"\ntopic = "c/{{key}}"\n'
    said = mistakes(tmp_path, 'master = "local-cluster[2,1,512]"', down)
    assert 'downlink "commands": Spark\'s Kafka source would need' in said
    assert said.endswith("[TL-C142]")
    assert "hunter2" not in said
    assert with_spark(tmp_path, 'master = "local[2]"', down).downlinks
    assert "TL-C142" not in mistakes(tmp_path, f'master = "{CLUSTER}"', secured)  # the sink reads the files there


def test_a_secret_in_the_file_is_refused_and_one_in_a_file_is_taken(tmp_path: Path) -> None:
    conf = 'conf = { "spark.authenticate.secret" = "hunter2" }'
    said = mistakes(tmp_path, conf)
    assert "[TL-C16]" in said
    assert "hunter2" not in said
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    bridge = with_spark(tmp_path, f'secret_file = "{secret}"\nmaster = "local-cluster[1,1,512]"')
    assert cluster_secret(bridge.spark) == "hunter2"
    assert cluster_secret(with_spark(tmp_path, f'secret_file = "{secret}"').spark) is None, "a local master makes one"
    assert session_settings(bridge)["spark.authenticate"] == "true"
    assert "hunter2" not in str(session_settings(bridge)) + bridge.model_dump_json()
    secret.write_text("\n")
    with pytest.raises(ConfigError, match=r"Spark's secret is empty.*\[TL-C141\]"):
        cluster_secret(bridge.spark)
    secret.unlink()
    with pytest.raises(ConfigError, match=r"Spark's secret can't be read \(no such file.*\[TL-C141\]"):
        cluster_secret(bridge.spark)


def test_what_names_a_place_of_this_machine_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_DIST_CLASSPATH", "/cache/hadoop-bare-naked-local-fs-0.1.0.jar")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / ("long" * 40)))
    here = session_settings(with_spark(tmp_path, 'master = "local[2]"'))
    there = session_settings(with_spark(tmp_path, 'master = "local-cluster[2,1,512]"'))
    assert here["spark.authenticate"] == "true", "other users of the machine reach Spark's ports"
    assert here["spark.hadoop.fs.file.impl"]
    assert "spark.hadoop.fs.file.impl" not in there
    assert there["spark.python.unix.domain.socket.dir"] == "/tmp"  # noqa: S108 - that of executors
    far = with_spark(tmp_path, "").spark.model_copy(update={"master": CLUSTER})
    assert "spark.driver.host" not in session_settings(with_spark(tmp_path, "").model_copy(update={"spark": far}))


def test_the_python_of_executors_leads_to_this_one_on_the_driver(tmp_path: Path) -> None:
    bridge = with_spark(tmp_path, 'master = "local-cluster[2,1,512]"\nconf = { "spark.pyspark.python" = "/opt/py" }')
    assert driver_environment(bridge, tmp_path, {"PATH": "/bin"})["PYSPARK_PYTHON"] == "/opt/py"
    named = driver_environment(bridge, tmp_path, {"PATH": "/bin", "PYSPARK_PYTHON": "python3.11"})
    assert named["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"
    driver_environment(bridge, tmp_path, {"PATH": "/bin", "PYSPARK_PYTHON": "./environment/bin/python"})
    assert (tmp_path / "environment" / "bin" / "python").exists()


def test_a_gateway_on_every_address_is_named_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(("cert_file", "key_file", "token_file"), "/x")
    one = ListenSettings.model_validate({"address": "g1:8815", **files})
    every = ListenSettings.model_validate({"address": "0.0.0.0:8815", **files})
    monkeypatch.setattr("socket.getfqdn", lambda: "g1.example")
    assert network_location(one) == "grpc+tls://g1:8815"
    assert network_location(every) == "grpc+tls://g1.example:8815"
    assert network_location(every, "10.0.0.5") == "grpc+tls://10.0.0.5:8815"
