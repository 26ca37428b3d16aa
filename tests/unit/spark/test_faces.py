"""Spark's options, a bridge file and the gateway's own settings say the same of a connection."""

from __future__ import annotations

import ssl
from pathlib import Path

from tests.unit.bridge.test_config import GOOD, read, told
from towline.gateway.settings import GatewaySettings
from towline.mqtt.events import Filter
from towline.net.driver import ReconnectSchedule
from towline.net.endpoint import Endpoint
from towline.net.settings import BrokerConnection, ClientSettings
from towline.net.tls import Tls
from towline.spark.options import parse_options, parse_sink_options

SUBSCRIBE = (
    '[{"filter": "a/#", "qos": 1, "noLocal": true, "retainAsPublished": false, "retainHandling": 2, '
    '"subscriptionId": 7}]'
)
SPARK = {
    "broker": "ws://h/x",
    "clientId": "c",
    "followRedirects": "true",
    "sourceAddress": "127.0.0.7",
    "reconnectDelay": "1",
    "reconnectMaxDelay": "128",
    "webSocketHeadersFile": "/headers",
    "willTopic": "w/t",
    "willPayload": "gone",
    "willQos": "1",
    "willRetain": "true",
    "willDelay": "5",
    "willExpiry": "60",
    "willContentType": "text/plain",
    "willResponseTopic": "r",
    "willCorrelationData": "c1",
    "willPayloadIsUtf8": "false",
    "willUserProperties": '[["a", "1, 2"], ["a", "3"]]',
}
TOML = """
client_id = "c"
follow_redirects = true
source_address = "127.0.0.7"
reconnect_delay_s = 1
reconnect_max_delay_s = 128
websocket_headers_file = "headers"
[uplink.mqtt.will]
topic = "w/t"
payload = "gone"
qos = 1
retain = true
delay_s = 5
expiry_s = 60
content_type = "text/plain"
response_topic = "r"
correlation_data = "c1"
payload_is_utf8 = false
user_properties = [["a", "1, 2"], ["a", "3"]]
"""
ROUTE = """
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
    will, settings = connection.session.will, connection.settings
    assert will is not None
    return [
        settings.reconnect_delay_s,
        settings.reconnect_max_delay_s,
        settings.follow_redirects,
        settings.source_address,
        connection.session.filters,
        will.write() if hasattr(will, "write") else repr(will),
    ]


def test_all_faces_say_the_same(tmp_path: Path) -> None:
    place = {"stateDir": str(tmp_path)}
    plan = parse_options({**SPARK, **place, "subscribe": SUBSCRIBE})
    source = GatewaySettings.model_validate_json(plan.address.settings)
    sink = GatewaySettings.model_validate_json(parse_sink_options({**SPARK, **place, "topic": "t"}).address.settings)
    (tmp_path / "headers").write_text("A: b\n")
    text = GOOD.partition("[[uplink.route]]")[0] + "[uplink.mqtt]" + TOML + ROUTE
    (line,) = read(text, tmp_path).uplinks
    spark, toml, out = (one.connection for one in (source, line.gateway, sink))
    assert facts(spark) == facts(toml)
    wanted = Filter("a/#", 1, no_local=True, retain_as_published=False, retain_handling=2, identifier=7)
    assert spark.session.filters == (wanted,)
    assert [*facts(out)[:4], facts(out)[5]] == [*facts(toml)[:4], facts(toml)[5]]
    assert (line.gateway.websocket_headers_file, source.websocket_headers_file) == (
        tmp_path / "headers",
        Path("/headers"),
    )


def test_routes_that_share_a_subscription_agree_about_it(tmp_path: Path) -> None:
    wide = ROUTE.replace('"a/#"', '"#"').replace("no_local = true", "no_local = false")
    (mistake,) = told(GOOD.partition("[[uplink.route]]")[0] + ROUTE + wide, tmp_path)
    assert '"a/#" is subscribed as part of "#", with other options' in mistake
    assert mistake.endswith("[TL-C67]")


def test_the_first_pause_and_the_longest_are_those_that_are_set() -> None:
    attempts = ReconnectSchedule(
        [Endpoint.parse("mqtt://h")], ClientSettings(reconnect_delay_s=2.0, reconnect_max_delay_s=8.0)
    )
    for longest in (2.0, 4.0, 8.0, 8.0):
        attempts.next_endpoint()
        attempts.record_failure(100.0, was_online=False)
        assert longest / 4 <= attempts.due_at - 100.0 <= longest


def test_the_oldest_tls_spoken_is_of_every_face(tmp_path: Path) -> None:
    options = {"broker": "mqtts://h", "stateDir": str(tmp_path), "tlsMinVersion": "1.3"}
    places = (
        parse_options({**options, "subscribe": "a"}).address,
        parse_sink_options({**options, "topic": "t"}).address,
    )
    gateways = [GatewaySettings.model_validate_json(place.settings) for place in places]
    mqtt = '[uplink.mqtt]\nbrokers = "mqtts://h"\ntls = { min_version = "1.3" }\n'
    gateways.append(read(GOOD.partition("[[uplink.route]]")[0] + mqtt + ROUTE, tmp_path).uplinks[0].gateway)
    connections = [one.connection for one in gateways]
    connections.append(ClientSettings(tls=Tls(min_version="1.3")).connection("mqtts://h", "c"))
    assert [one.settings.tls.context().minimum_version for one in connections] == [ssl.TLSVersion.TLSv1_3] * 4
