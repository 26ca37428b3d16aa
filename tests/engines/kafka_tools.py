"""``kafka-topics.sh`` and ``kafka-acls.sh``, as far as docs/production.md uses them: the devstack lacks their jar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

#: Option of ``kafka-acls.sh`` → kind of resource.
_RESOURCES = {"topic": ResourceType.TOPIC, "transactional_id": ResourceType.TRANSACTIONAL_ID}
_TIMEOUT_S = 60


def client_settings(servers: str, file: Path) -> dict[str, Any]:
    """Settings of a librdkafka client, of a properties file with PEM stores of Java's."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    properties = dict(line.split("=", 1) for line in lines)
    pair = properties.pop("ssl.keystore.location")
    assert (properties.pop("ssl.keystore.type"), properties.pop("ssl.truststore.type")) == ("PEM", "PEM")
    settings = {"bootstrap.servers": servers, "ssl.ca.location": properties.pop("ssl.truststore.location")}
    return {**settings, **properties, "ssl.certificate.location": pair, "ssl.key.location": pair}


def _parsed(program: str, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(program, allow_abbrev=False)
    parser.add_argument("--bootstrap-server", required=True)
    parser.add_argument("--command-config", type=Path, required=True)
    if program == "kafka-topics.sh":
        parser.add_argument("--create", action="store_true", required=True)
        parser.add_argument("--topic", required=True)
        parser.add_argument("--partitions", type=int, required=True)
    else:
        parser.add_argument("--add", action="store_true", required=True)
        parser.add_argument("--allow-principal", required=True)
        parser.add_argument("--resource-pattern-type", choices=["literal", "prefixed"], default="literal")
        parser.add_argument("--operation", action="append", required=True)
        parser.add_argument("--topic", action="append", default=[])
        parser.add_argument("--transactional-id", action="append", default=[])
        parser.add_argument("--cluster", action="store_true")
    return parser.parse_args(words)


def _bindings(options: argparse.Namespace) -> Iterator[AclBinding]:
    form = ResourcePatternType[options.resource_pattern_type.upper()]
    resources = [(kind, name, form) for option, kind in _RESOURCES.items() for name in vars(options)[option]]
    if options.cluster:
        resources.append((ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL))
    for kind, name, pattern in resources:
        for operation in options.operation:
            right = {"DescribeConfigs": AclOperation.DESCRIBE_CONFIGS}.get(operation) or AclOperation[operation.upper()]
            yield AclBinding(kind, name, pattern, options.allow_principal, "*", right, AclPermissionType.ALLOW)


def main(program: str, *words: str) -> None:
    """Run a program with its arguments."""
    options = _parsed(program, words)
    admin = AdminClient(client_settings(options.bootstrap_server, options.command_config))
    futures = (
        admin.create_topics([NewTopic(options.topic, options.partitions)])
        if program == "kafka-topics.sh"
        else admin.create_acls([*_bindings(options)])
    )
    for future in futures.values():
        future.result(_TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
