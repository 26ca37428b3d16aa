"""The way to a broker: an address, an open connection, and a sentence for each way it can fail.

`connect` stacks socket, TLS and WebSocket and returns a `Transport`, which has the same verbs whatever lies beneath.
"""

from towline.net.transport.connecting import Transport, connect
from towline.net.transport.endpoint import Endpoint, Proxy, other_port, query_problem
from towline.net.transport.tls import Tls
from towline.net.transport.websocket import header_problem

__all__ = ["Endpoint", "Proxy", "Tls", "Transport", "connect", "header_problem", "other_port", "query_problem"]
