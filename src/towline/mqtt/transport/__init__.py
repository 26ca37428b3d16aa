"""The way to a broker: an address, an open connection, and a sentence for each way it can fail.

Layers, each a module with the verbs of the one below: socket (`sockets`, through a proxy: `proxy`), TLS (`tls`),
WebSocket (`websocket`). `connect` stacks them and returns a `Transport`.
"""

from towline.mqtt.transport.connecting import connect
from towline.mqtt.transport.endpoint import Endpoint
from towline.mqtt.transport.proxy import Proxy
from towline.mqtt.transport.stream import Transport
from towline.mqtt.transport.tls import Tls

__all__ = ["Endpoint", "Proxy", "Tls", "Transport", "connect"]
