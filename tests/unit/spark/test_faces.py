"""Spark's options, a bridge file and the gateway's own settings say the same of a connection."""

from __future__ import annotations

import ssl
from pathlib import Path

from towline.bridge.config.file import parse
from towline.gateway.settings import GatewaySettings
from towline.mqtt.events import Filter
from towline.net.settings import BrokerConnection
from towline.spark.options import parse_options, parse_sink_options

SUBSCRIBE = (
    '[{"filter": "a/#", "qos": 1, "noLocal": true, "retainAsPublished": false, "retainHandling": 2, '
    '"subscriptionId": 7}]'
)
SPARK = {
    "broker": "wss://h/x",
    "clientId": "c",
    "followRedirects": "true",
    "reconnectMaxDelay": "128",
    "tlsMinVersion": "1.3",
    "webSocketHeadersFile": "/headers",
    "willTopic": "w/t",
    "willPayload": "gone",
    "willQos": "1",
    "willDelay": "5",
    "willExpiry": "60",
    "willUserProperties": '[["a", "1, 2"], ["a", "3"]]',
}
TOML = """
name = "plant-7"
state_dir = "state"
kafka = { bootstrap_servers = "k1:9092" }
[[uplink]]
name = "telemetry"
[uplink.mqtt]
brokers = "wss://h/x"
client_id = "c"
follow_redirects = true
reconnect_max_delay_s = 128
tls = { min_version = "1.3" }
websocket_headers_file = "headers"
[uplink.mqtt.will]
topic = "w/t"
payload = "gone"
qos = 1
delay_s = 5
expiry_s = 60
user_properties = [["a", "1, 2"], ["a", "3"]]
[[uplink.route]]
from = "a/#"
topic = "t"
qos = 1
no_local = true
retain_as_published = false
retain_handling = 2
subscription_id = 7
"""


def facts(connection: BrokerConnection) -> list[object]:
    settings = connection.settings
    tls = settings.tls.context().minimum_version
    return [settings.reconnect_max_delay_s, settings.follow_redirects, connection.session.will, tls]


def test_all_faces_say_the_same(tmp_path: Path) -> None:
    place = {"stateDir": str(tmp_path)}
    plan = parse_options({**SPARK, **place, "subscribe": SUBSCRIBE})
    source = GatewaySettings.model_validate_json(plan.address.settings)
    sink = GatewaySettings.model_validate_json(parse_sink_options({**SPARK, **place, "topic": "t"}).address.settings)
    (tmp_path / "headers").write_text("A: b\n")
    (line,) = parse(TOML, tmp_path / "bridge.toml", {}).uplinks
    toml, *spark = (facts(one.connection) for one in (line.gateway, source, sink))
    assert spark == [toml, toml]
    assert toml[-1] is ssl.TLSVersion.TLSv1_3
    assert toml[-2] is not None
    wanted = Filter("a/#", 1, no_local=True, retain_as_published=False, retain_handling=2, identifier=7)
    assert [one.connection.session.filters for one in (line.gateway, source)] == [(wanted,), (wanted,)]
    assert line.gateway.websocket_headers_file == tmp_path / "headers"
    assert source.websocket_headers_file == Path("/headers")
