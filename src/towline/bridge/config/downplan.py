"""What a downlink would do: its part of `towline check`."""

from __future__ import annotations

from typing import Any, Final

from towline.bridge.config.downlink import KafkaPattern, Spoken, Sql
from towline.bridge.config.model import DownLine
from towline.guarantee import Guarantee, policy

__all__ = ["plan_line", "render_line", "warnings_of"]

#: What the promise costs beside the CPU, in words.
_COST: Final = {
    Guarantee.AT_MOST_ONCE: "an fdatasync a batch; nothing is waited for at the broker",
    Guarantee.AT_LEAST_ONCE: "an fdatasync a batch",
    Guarantee.EXACTLY_ONCE: "an fdatasync a batch and a gulp (packet ids); two more packets a message (QoS 2)",
}
#: What no switch can give.
_LIMITS: Final = (
    "a broker that loses its store loses what only it held",
    "the machine that holds state_dir holds what was taken and is not yet delivered",
    "Kafka deletes by retention whether a line has read it or not",
)
_LIMITS_ONCE: Final = ("a subscriber with QoS 0 or 1 may lose or double what the broker got once",)
#: The policy for control characters in topics and properties, in words.
_CONTROL_WORDS: Final = {
    "send": "with control characters it is sent; a broker that ends the connection at it gets it three times",
    "dead_letter": "with control characters a record is a dead letter: a broker may end the connection at it",
}
_LOST: Final = {
    Guarantee.AT_MOST_ONCE: "yes: what is on the way when a process or a broker fails",
    Guarantee.AT_LEAST_ONCE: "no, from Kafka to the broker, as long as the state directory is kept",
    Guarantee.EXACTLY_ONCE: "no, from Kafka to the broker, as long as the state directory is kept",
}
_DOUBLED: Final = {
    Guarantee.AT_MOST_ONCE: "no",
    Guarantee.AT_LEAST_ONCE: "yes: what was not acknowledged when a connection or a process failed",
    Guarantee.EXACTLY_ONCE: "no, for a subscriber with QoS 2",
}


def plan_line(line: DownLine) -> dict[str, Any]:
    """The plan of a line as JSON values."""
    section, gateway = line.section, line.gateway
    start = section.starting_offsets
    return {
        "name": line.name,
        "direction": "down",
        "guarantee": line.guarantee.value,
        "lost": _LOST[line.guarantee],
        "doubled": _DOUBLED[line.guarantee],
        "cost": _COST[line.guarantee] + ("; a transaction a batch" if _transactions(line) else ""),
        "limits": [*(_LIMITS_ONCE if line.guarantee is Guarantee.EXACTLY_ONCE else ()), *_LIMITS],
        "brokers": [str(broker) for broker in gateway.brokers],
        "client_id": gateway.mqtt_client_id,
        "from": f"topics like {section.from_.pattern}" if isinstance(section.from_, KafkaPattern) else section.topics,
        "isolation": policy(line.guarantee).isolation,
        "starting_offsets": start if isinstance(start, str) else "as listed",
        "on_data_loss": section.on_data_loss,
        "topic": _words(section.topic),
        "qos": line.qos,
        "properties": section.properties,
        "where": section.where,
        "transform": section.transform,
        "confirm": section.confirm,
        "kafka_topics": list(line.fixed_topics),
        "state_dir": str(gateway.state_dir),
        "outbox_max_bytes": gateway.outbox.max_bytes if gateway.outbox else None,
        "max_messages_per_trigger": line.max_messages_per_trigger,
        "parallelism": line.parallelism,
        "dead_letter_topic": line.dead_letter_topic,
        "control_characters": line.control_characters,
    }


def _transactions(line: DownLine) -> bool:
    return line.dead_letter_topic is not None and policy(line.guarantee).transactions


def _words(said: Spoken) -> str:
    return f"SQL {said.sql}" if isinstance(said, Sql) else said


def warnings_of(line: DownLine) -> list[str]:
    """What is allowed and yet deserves a thought."""
    found = []
    if line.dead_letter_topic is None and line.control_characters == "dead_letter":
        found.append("a record with a control character in a topic or property stops the line, too.")
    if line.dead_letter_topic is None:
        found.append("a record that MQTT can't carry stops the line: there is no dead_letter_topic.")
    if line.section.on_data_loss == "go_on":
        found.append("on_data_loss = go_on: what Kafka deletes before it was read is lost without an error.")
    if line.parallelism > 1 and line.guarantee is Guarantee.EXACTLY_ONCE and line.section.transform:
        found.append("the transform has to be deterministic: a batch that a crash interrupted goes through it again.")
    return found


def render_line(line: dict[str, Any]) -> list[str]:
    """The plan of a line as text."""
    source = line["from"] if isinstance(line["from"], str) else ", ".join(line["from"])
    lost = {"stop": "stops when Kafka deleted what it has not read", "go_on": "goes on when Kafka deleted records"}
    parts = [f"mqtt:{line['topic']}", f"QoS {line['qos']}", f"properties {line['properties']}"]
    parts += [f"where {line['where']}"] if line["where"] else []
    parts += [f"transform {line['transform']}"] if line["transform"] else []
    limit = f"outbox up to {line['outbox_max_bytes']:,} B" if line["outbox_max_bytes"] else "outbox up to the disk"
    told = {
        "outbox": "a batch is written when it is on disk here",
        "broker": "a batch is written when the broker has it",
    }
    dead = f"dead letters to {line['dead_letter_topic']}" if line["dead_letter_topic"] else "no dead letters"
    return [
        f'▸ line "{line["name"]}"   {line["guarantee"]}   Kafka → MQTT',
        f"  kafka     {source}   {line['isolation']}   from {line['starting_offsets']}   {lost[line['on_data_loss']]}",
        f"  broker    {', then '.join(line['brokers'])}   client id {line['client_id']}",
        f"  publish   {'   '.join(parts)}",
        f"  confirm   {told[line['confirm']]}   {dead}",
        f"  text      {_CONTROL_WORDS[line['control_characters']]}",
        "  replay    a batch that a crash interrupted is served again; what is in the outbox stays out",
        f"  lost      {line['lost']}",
        f"  doubled   {line['doubled']}",
        f"  cost      {line['cost']}",
        *(f"  limit     {text}" for text in line["limits"]),
        f"  state     {line['state_dir']}   {limit}",
    ]
