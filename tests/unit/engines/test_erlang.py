"""Brokers on Erlang: what is told where they are not, and what their configuration is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.erlang import Ejabberd, OnErlang, RabbitMQ
from towline.errors import SetupError


@pytest.mark.parametrize("kind", [RabbitMQ, Ejabberd])
def test_a_broker_that_is_not_here_is_an_error_that_says_how_to_get_it(
    kind: type[OnErlang], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kind, "installed", (str(tmp_path), "*/x"))
    with pytest.raises(SetupError, match=r"setup.py soak.*\[TL-S10\]"):
        kind.find()


def test_a_configuration_listens_on_loopback_alone_and_takes_settings(tmp_path: Path) -> None:
    modules = tmp_path / "plugins"
    (modules / "rabbit-3.10.8" / "ebin").mkdir(parents=True)
    RabbitMQ(tmp_path, settings={"mqtt.prefetch": "3"})._prepare((1883, 1884), modules)
    Ejabberd(tmp_path, settings={"max_queue": "9"})._prepare((1883,), modules)
    rabbitmq, ejabberd = (tmp_path / "rabbitmq.conf").read_text(), (tmp_path / "ejabberd.yml").read_text()
    assert "mqtt.listeners.tcp.1 = 127.0.0.1:1883\n" in rabbitmq
    assert "listeners.tcp = none\n" in rabbitmq, "no AMQP"
    assert "mqtt.prefetch = 3\n" in rabbitmq
    assert '{port: 1883, ip: "127.0.0.1", module: mod_mqtt}' in ejabberd
    assert "    max_queue: 9\n" in ejabberd
