"""What a real Mosquitto's TLS is refused for, each in its own sentence."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from mqtt5 import ConnectPacket

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway
from tests.integration.net.conftest import Authority
from tests.integration.net.test_pub import run
from towline import Client, ClientSettings
from towline.errors import BrokerError, Unreachable
from towline.net.connecting import connect
from towline.net.endpoint import Endpoint, Tls
from towline_prove.devstack import Mosquitto

CONNECT = ConnectPacket("test", clean_start=True, keep_alive=10).write()


def refusal(broker: Mosquitto, tls: Tls, host: str = "localhost") -> str:
    with pytest.raises(Unreachable) as caught:
        connect(Endpoint("mqtts", host, broker.port), ClientSettings(tls=tls))
    return str(caught.value).replace(str(broker.port), "PORT")


def greeting(broker: Mosquitto, tls: Tls, host: str = "localhost") -> bytes | BrokerError | None:
    """The first bytes after CONNECT, or why there are none."""
    transport = connect(Endpoint("mqtts", host, broker.port), ClientSettings(tls=tls))
    try:
        transport.write(CONNECT)
        answers: list[bytes] = []

        def answered() -> bool:
            data = transport.read()
            if data is not None:
                answers.append(data)
            return bool(answers)

        wait_until(answered, what="an answer")
        return answers[0] or transport.error
    finally:
        transport.close()


def test_an_expired_certificate(new_mosquitto: NewMosquitto, new_gateway: NewGateway, authority: Authority) -> None:
    """Who takes any has that in the status."""
    broker = new_mosquitto(**authority.listener("localhost", days=(-60, -3)))
    assert refusal(broker, Tls(ca_file=authority.ca_file)) == (
        "mqtts://localhost:PORT: the server's certificate is not accepted (certificate has expired). "
        "The broker needs a valid one; is the clock of this machine right?   [TL-M07]"
    )
    new_gateway(broker, tls=Tls(insecure=True)).connect(insecure=True)


#: As mosquitto-tls(7) of Mosquitto 2.0.21 has them, with names and days in place of its questions.
MANUAL = """
openssl req -new -x509 -days 30 -extensions v3_ca -keyout ca.key -out ca.crt -nodes -subj /O=Works/CN=Works
openssl genrsa -out server.key 2048
openssl req -out server.csr -key server.key -new -subj /CN=localhost
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 30 -extfile names
"""


def test_an_authority_made_by_mosquittos_manual(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    """On every Python as on 3.13, whose default is VERIFY_X509_STRICT."""
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost")
    for command in MANUAL.strip().splitlines():
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    broker = new_mosquitto(certfile=str(tmp_path / "server.crt"), keyfile=str(tmp_path / "server.key"))
    ca_file = tmp_path / "ca.crt"
    assert refusal(broker, Tls(ca_file=ca_file)) == (
        "mqtts://localhost:PORT: the server's certificate is not accepted (CA cert does not include key usage "
        "extension). Reissue it and its authority by RFC 5280, or set tls.strict = false: the rest is verified."
        "   [TL-M07]"
    )
    assert isinstance(greeting(broker, Tls(ca_file=ca_file, strict=False)), bytes)
    assert "is not valid for '127.0.0.1'" in refusal(broker, Tls(ca_file=ca_file, strict=False), "127.0.0.1")
    assert "set tls.ca_file" in refusal(broker, Tls(strict=False))


def test_a_client_certificate_is_asked_for(new_mosquitto: NewMosquitto, authority: Authority, tmp_path: Path) -> None:
    broker = new_mosquitto(**authority.listener("localhost"), cafile=str(authority.ca_file), require_certificate="true")
    bare = str(greeting(broker, Tls(ca_file=authority.ca_file)))
    assert "the broker needs another client certificate (certificate required)" in bare
    assert "Set or check tls.cert_file and tls.key_file.   [TL-M09]" in bare
    cert_file, key_file = Authority(tmp_path / "other").issue("gateway")
    foreign = Tls(ca_file=authority.ca_file, cert_file=cert_file, key_file=key_file)
    said = str(greeting(broker, foreign))
    assert "the broker needs another client certificate (unknown ca)." in said
    cert_file, key_file = authority.issue("gateway")
    assert isinstance(greeting(broker, Tls(ca_file=authority.ca_file, cert_file=cert_file, key_file=key_file)), bytes)
    files = f"--ca-file {authority.ca_file} --cert-file {cert_file} --key-file {key_file}"
    assert run(broker.uri.replace("127.0.0.1", "localhost"), "t", *files.split()) == 0


def test_tls_to_a_port_without(mosquitto: Mosquitto) -> None:
    said = refusal(mosquitto, Tls())
    assert said.startswith("mqtts://localhost:PORT: no TLS (")
    assert said.endswith(
        "Is it a port without TLS? That is mqtt://localhost:PORT, which anyone on the way can read.   [TL-M02]"
    )


def test_a_port_for_tls_without_it(new_mosquitto: NewMosquitto, authority: Authority) -> None:
    broker = new_mosquitto(**authority.listener("localhost"))
    for scheme, said in (("mqtt", "Is this port an MQTT listener"), ("ws", "Is this port a WebSocket listener?")):
        uri = f"{scheme}://localhost:{broker.port}"
        with pytest.raises(BrokerError) as caught:
            Client(uri, client_id="x")
        assert said in caught.value.remedy
        assert f" Is it a port for TLS? That is {scheme}s://localhost:{broker.port}" in caught.value.remedy


def test_alpn_and_the_name_that_is_sent(authority: Authority) -> None:
    """Mosquitto knows no ALPN, so Python's own server stands in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("broker.local"))
    context.set_alpn_protocols(["mqtt"])
    seen: list[str | None] = []
    context.sni_callback = lambda _sock, name, _context: seen.append(name)

    def serve() -> None:
        with server.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as sock:
            seen.append(sock.selected_alpn_protocol())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        tls = Tls(ca_file=authority.ca_file, alpn=("other", "mqtt"), server_name="broker.local")
        connect(Endpoint("mqtts", "127.0.0.1", server.getsockname()[1]), ClientSettings(tls=tls)).close()
        thread.join(60)
    assert seen == ["broker.local", "mqtt"]


def test_the_gateway_says_it_and_goes_on_when_it_is_mended(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, authority: Authority
) -> None:
    broker = new_mosquitto(**authority.listener("broker.local"))
    gateway = new_gateway(f"mqtts://localhost:{broker.port}", tls=Tls(ca_file=authority.ca_file))
    gateway.start()
    status = wait_until(lambda: s if (s := gateway.status())["last_error"] else None, what="an error")
    assert status["last_error"]["code"] == "TL-M07"
    assert "is not valid for 'localhost'" in status["last_error"]["text"]
    broker.stop()
    mended = authority.listener("localhost")
    Path(broker.settings["certfile"]).write_bytes(Path(mended["certfile"]).read_bytes())
    Path(broker.settings["keyfile"]).write_bytes(Path(mended["keyfile"]).read_bytes())
    broker.start()
    gateway.until(state="online")


def test_a_file_that_is_away_while_it_is_renewed_does_not_end_a_gateway_that_worked(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, authority: Authority, tmp_path: Path
) -> None:
    broker = new_mosquitto(**authority.listener("localhost"))
    ca_file = tmp_path / "ca.pem"
    gateway = new_gateway(f"mqtts://localhost:{broker.port}", tls=Tls(ca_file=ca_file))
    assert "TL-C30" in gateway.fail(), "at the start it does"
    ca_file.write_bytes(authority.ca_file.read_bytes())
    gateway.connect()
    ca_file.unlink()
    broker.restart()
    wait_until(lambda: (gateway.status()["last_error"] or {}).get("code") == "TL-C30", what="the missing file")
    ca_file.write_bytes(authority.ca_file.read_bytes())
    gateway.until(state="online")
