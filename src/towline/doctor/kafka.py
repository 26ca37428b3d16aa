"""Checks of Kafka: replicas, in-sync replicas, transactions, sizes, retention, compaction, ACLs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from towline.bridge.config.model import Uplink
from towline.doctor.cluster import TRANSACTION_TOPIC, ClusterProbe, TopicRole, TopicState, TopicUse
from towline.doctor.table import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS, Check, Finding, bytes_text, names_text
from towline.errors import ConfigError, KafkaError
from towline.guarantee import policy
from towline.kafka.clientconfig import max_message_bytes
from towline.kafka.faults import ErrorKind, is_kind
from towline.text import duration_text

#: librdkafka's name of an advertised broker, with the broker id; a bootstrap server has none.
_BROKER_ADDRESS: Final = re.compile(r"(?P<address>\S+:\d+)/(?P<id>\d+): (?P<reason>.+)")
#: Replicas that tolerate the loss of one broker while another is down.
_SAFE_REPLICAS: Final = 3
#: Bytes of a record besides its payload.
_RECORD_OVERHEAD = 1024
#: A day, and a retention that counts as unlimited (Kafka's own is 292 million years).
_DAY_MS, _UNLIMITED_MS = 86_400_000, 3650 * 86_400_000
#: Minimum retention by role, and the outage it covers: a consumer may be down for a lunch break; dead letters and a
#: stopped line are handled the next morning.
_MIN_RETENTION: Final = {
    TopicRole.RECORDS: (3_600_000, "a consumer is down for {}"),
    TopicRole.NOTICES: (3_600_000, "a consumer is down for {}"),
    TopicRole.DEAD_LETTERS: (_DAY_MS, "nobody replays a dead letter for {}"),
    TopicRole.SOURCE: (_DAY_MS, "the line is stopped for {}: records deleted meanwhile are never sent"),
}
_ALTER: Final = "kafka-configs.sh --bootstrap-server SERVERS --alter --topic TOPIC --add-config"
_ACL: Final = "kafka-acls.sh --bootstrap-server SERVERS --add --allow-principal User:THIS"


def _merge_topics(
    cluster: ClusterProbe, findings: Iterable[tuple[str, Finding | None]], default: Finding | None = None
) -> Iterator[Finding]:
    """Merge equal findings of several topics, else yield `default`; ``TOPIC`` in a remedy becomes the first of them."""
    topics_by_finding: dict[Finding, list[str]] = {}
    for name, finding in findings:
        if finding is not None:
            topics_by_finding.setdefault(finding, []).append(name)
    if not topics_by_finding and default is not None:
        yield default
    for finding, names in topics_by_finding.items():
        remedy = finding.remedy.replace("TOPIC", names[0]).replace("SERVERS", cluster.servers)
        yield replace(finding, evidence=f"{names_text(names)}: {finding.evidence}", remedy=remedy)


def _required_topics(cluster: ClusterProbe) -> list[TopicState]:
    """Return each topic that the lines' records depend on once."""
    names = dict.fromkeys(use.name for use in cluster.topic_uses)
    if cluster.writers:
        names[TRANSACTION_TOPIC] = None
    return [cluster.topics[name] for name in names if name in cluster.topics]


def _check_reachable(cluster: ClusterProbe) -> Iterator[Finding]:
    try:
        info = cluster.cluster_info
    except (KafkaError, ConfigError) as error:
        if match := _BROKER_ADDRESS.search(error.problem):
            yield _unreachable_finding(int(match["id"]), match["address"], match["reason"])
        else:
            remedy = error.remedy or f"Is {cluster.servers} right, and up?"
            yield Finding(BROKEN, error.problem, "now: nothing reaches Kafka", remedy)
        return
    errors = sorted(cluster.unreachable.items())
    yield from (_unreachable_finding(broker_id, info.brokers[broker_id], error) for broker_id, error in errors)
    if not cluster.unreachable:
        count = len(info.brokers)
        yield Finding(HOLDS, f"{count} broker{'' if count == 1 else 's'} of cluster {info.cluster_id}")


def _unreachable_finding(broker_id: int, address: str, reason: str) -> Finding:
    evidence = f"broker {broker_id} advertises {address}, which is unreachable: {reason}"
    limit = "now: the partitions that it leads can't be written or read from here"
    return Finding(BROKEN, evidence, limit, "Correct its advertised.listeners, or the network.")


def _check_topics(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D26: missing topics. Topics without the right to describe them are TL-D39."""
    new_topics, findings = [], []
    limit = "never: the line does not start"
    for use in cluster.topic_uses:
        if not use.required or use.name in cluster.described_topics:
            continue
        error_name, error_text = cluster.create_errors.get(use.name, ("", ""))
        if not use.auto_created:
            remedy = "Set [kafka] create_topics, or: kafka-topics.sh --bootstrap-server SERVERS --create --topic TOPIC"
            findings.append((use.name, Finding(BROKEN, "does not exist", limit, remedy)))
        elif not error_name:
            new_topics.append(use.name)
        elif not is_kind(error_name, ErrorKind.ACCESS_RIGHTS) and error_name != "TOPIC_ALREADY_EXISTS":
            remedy = "Correct [kafka] create_topics, or create it manually."
            findings.append((use.name, Finding(BROKEN, f"Kafka refuses to create it: {error_text}", limit, remedy)))
    yield from _merge_topics(cluster, findings)
    if new_topics:
        yield Finding(LIMITED, f"Towline creates {names_text(new_topics)} at the start")
    elif not findings:
        yield Finding(HOLDS, f"{len(cluster.described_topics)} topics exist")


def _check_replicas(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D27: number of brokers that may be lost; the transaction topic is checked like any other."""
    brokers, log_topic = cluster.cluster_info.brokers, cluster.topics.get(TRANSACTION_TOPIC)
    if cluster.writers and log_topic is not None and log_topic.is_planned and log_topic.replicas > len(brokers):
        evidence = f"{TRANSACTION_TOPIC}: Kafka can't create {log_topic.replicas} replicas on {len(brokers)} brokers"
        remedy = "Start as many brokers, or set transaction.state.log.replication.factor and "
        remedy += f"transaction.state.log.min.isr to what {len(brokers)} can hold."
        yield Finding(BROKEN, evidence, "never: no transaction begins", remedy)
    if len(brokers) == 1:
        evidence = f"Kafka is one broker ({next(iter(brokers.values()))}): every topic has one replica"
        limit = "its disk is lost, with all acknowledged records; while it is down nothing reaches Kafka"
        remedy = "Fine for tests. Else: three brokers, replication factor 3, min.insync.replicas 2."
        yield Finding(WARNS, evidence, limit, remedy)
        return
    topics = _required_topics(cluster)
    evidence = f"{len(topics)} topics have {_SAFE_REPLICAS} replicas or more, on {len(brokers)} brokers"
    default = Finding(HOLDS, evidence, "several brokers lose their disks at once") if topics else None
    yield from _merge_topics(cluster, ((topic.name, _replica_finding(topic)) for topic in topics), default)


def _replica_finding(topic: TopicState) -> Finding | None:
    if topic.replicas >= _SAFE_REPLICAS:
        return None
    evidence = f"replication factor {topic.replicas}{' when it is created' if topic.is_planned else ''}"
    remedy = "Move it to three brokers: kafka-reassign-partitions.sh."
    if topic.is_planned and topic.name == TRANSACTION_TOPIC:
        remedy = "Set transaction.state.log.replication.factor to 3."
    elif topic.is_planned:
        remedy = "Set replication_factor = 3 in create_topics, or the cluster's default.replication.factor."
    if topic.replicas < 2:
        return Finding(WARNS, evidence, "the disk of one broker is lost", remedy)
    return Finding(WARNS, evidence, "one broker is down: writing then stops, or depends on one replica", remedy)


def _check_in_sync(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D28: min.insync.replicas against the replicas, and the replicas in sync now."""
    topics = _required_topics(cluster)
    min_isr = " or ".join(map(str, sorted({topic.int_setting("min.insync.replicas") or 0 for topic in topics})))
    several = len(cluster.cluster_info.brokers) > 1
    limit = "two brokers of a topic are down: writing waits for one of them" if several else ""
    default = Finding(HOLDS, f"every replica is in sync, min.insync.replicas {min_isr}", limit) if topics else None
    findings = ((topic.name, rule(topic)) for topic in topics for rule in (_min_isr_finding, _isr_finding))
    yield from _merge_topics(cluster, findings, default)


def _min_isr_finding(topic: TopicState) -> Finding | None:
    """Return the finding about min.insync.replicas; topics with two replicas or fewer are TL-D27."""
    # A value above the number of replicas counts as that number (`Partition.effectiveMinIsr`; seen on 4.3).
    min_isr = topic.int_setting("min.insync.replicas")
    if min_isr is None or topic.replicas < _SAFE_REPLICAS or 1 < min_isr < topic.replicas:
        return None
    evidence = f"min.insync.replicas = {min_isr} of {topic.replicas} replicas"
    remedy = f"{_ALTER} min.insync.replicas=2"
    if topic.is_planned:
        setting = "transaction.state.log.min.isr" if topic.name == TRANSACTION_TOPIC else "min.insync.replicas"
        remedy = f"Set the cluster's {setting} to 2."
    limit = "one broker is down: nothing can be written then"
    if min_isr == 1:
        limit = "the one broker that has an acknowledged record loses its disk"
    return Finding(WARNS, evidence, limit, remedy)


def _isr_finding(topic: TopicState) -> Finding | None:
    remedy = "Is a broker down, or slow? kafka-topics.sh --describe --under-replicated-partitions names it."
    if topic.leaderless_partitions:
        evidence = f"{topic.leaderless_partitions} of {topic.partitions} partitions have no leader"
        return Finding(BROKEN, evidence, "now: they can't be written or read", remedy)
    if topic.in_sync >= topic.replicas:
        return None
    min_isr = min(topic.int_setting("min.insync.replicas") or 1, topic.replicas)
    evidence = f"{topic.in_sync} of {topic.replicas} replicas are in sync"
    if topic.in_sync < min_isr:
        return Finding(BROKEN, f"{evidence}, min.insync.replicas is {min_isr}", "now: Kafka accepts no record", remedy)
    return Finding(WARNS, evidence, f"{topic.in_sync - min_isr + 1} more brokers are down", remedy)


def _check_unclean_election(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D30: unclean leader election: whether a replica out of sync may lead. One replica has no alternative."""
    setting = "unclean.leader.election.enable"
    topics = [topic for topic in _required_topics(cluster) if topic.replicas > 1 and setting in (topic.settings or {})]
    limit = "all in-sync replicas are down: a replica out of sync may lead, and records it lacks are lost"
    warning = Finding(WARNS, f"{setting} = true", limit, f"{_ALTER} {setting}=false")
    findings = ((topic.name, warning) for topic in topics if (topic.settings or {})[setting] == "true")
    yield from _merge_topics(cluster, findings, Finding(HOLDS, f"{setting} = false") if topics else None)


def _check_transactions(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D31: start of a transaction with each writer's timeout, and transactions that stay open."""
    for name, hidden_count in cluster.hidden_offsets.items():
        evidence = f"{name}: {hidden_count:,} offsets are behind an open transaction of an unknown transactional id"
        remedy = f"Name its writer: kafka-transactions.sh --bootstrap-server {cluster.servers} find-hanging, or list."
        limit = "now: read_committed consumers wait until it ends, at the latest by its timeout"
        yield Finding(WARNS, evidence, limit, remedy)
    if not cluster.writers:
        return
    setting, max_ms = "transaction.max.timeout.ms", cluster.lowest_setting("transaction.max.timeout.ms")
    timeout_ms = max(writer.timeout_ms for writer in cluster.writers)
    errors = cluster.begin_errors
    attempts = [(writer, errors[writer.probe_id]) for writer in cluster.writers if writer.probe_id in errors]
    failures = [(writer, error) for writer, error in attempts if error[0] not in {"", _ID_DENIED}]
    timeouts = f"transaction.timeout.ms = {timeout_ms:,}"
    timeouts += "" if max_ms is None else f", {setting} = {max_ms:,} of the brokers"
    invalid = any(error_name == "INVALID_TRANSACTION_TIMEOUT" for _, (error_name, _) in failures)
    if invalid or (max_ms is not None and max_ms < timeout_ms):
        limit = "never: Kafka refuses to begin a transaction"
        yield Finding(BROKEN, timeouts, limit, f"Raise {setting} of the brokers.")
        return
    for writer, (_, error_text) in failures:
        evidence = f"a transaction of {writer.probe_id} could not begin: {error_text}"
        remedy = "Is a broker down, or Kafka busy? Fix it, and run doctor again."
        yield Finding(BROKEN, evidence, "never: the line writes nothing", remedy, writer.line)
    if attempts and not failures and any(not error_name for _, (error_name, _) in attempts):
        yield Finding(HOLDS, f"{names_text(writer.line for writer, _ in attempts)} began a transaction; {timeouts}")


def _check_record_size(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D33: largest message that fits into a record."""
    client_limit = max_message_bytes(cluster.inputs.bridge.kafka.client_settings())
    for line in cluster.inputs.bridge.uplinks:
        names = {use.name for use in cluster.topic_uses if use.line == line.name and use.role is TopicRole.RECORDS}
        topics = [topic for name, topic in cluster.topics.items() if name in names]
        sizes = [(topic.int_setting("max.message.bytes"), topic.name) for topic in topics]
        limits = [(size, f"max.message.bytes = {size:,} of {name}") for size, name in sizes if size is not None]
        if limits:
            limits.append((client_limit, f"message.max.bytes = {client_limit:,} in [kafka] settings"))
            yield _size_finding(line, *min(limits))


def _size_finding(line: Uplink, record_bytes: int, record_limit: str) -> Finding:
    packet_bytes = line.gateway.max_packet_bytes
    evidence = f"{record_limit}; max_packet_bytes = {packet_bytes:,} in [mqtt]"
    limit = f"a message of more than {bytes_text(record_bytes - _RECORD_OVERHEAD)}"
    if packet_bytes <= record_bytes - _RECORD_OVERHEAD:
        return Finding(HOLDS, evidence, line=line.name)
    if not policy(line.guarantee).replays_batches:
        return Finding(LIMITED, evidence, f"{limit}, which is dropped", line=line.name)
    if line.dead_letter_topic:
        return Finding(LIMITED, evidence, f"{limit}, which becomes a dead letter, in parts", line=line.name)
    remedy = "Give the line a dead_letter_topic; or raise max.message.bytes, and message.max.bytes in [kafka] settings."
    return Finding(WARNS, evidence, f"{limit}: it stops the line until an operator acts", remedy, line.name)


def _check_retention(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D34: retention of records against the expected outage of their reader."""
    yield from _merge_topics(cluster, ((use.name, _retention_finding(cluster, use)) for use in cluster.topic_uses))


def _retention_finding(cluster: ClusterProbe, use: TopicUse) -> Finding | None:
    topic = cluster.topics.get(use.name)
    if topic is None or not topic.cleanup_policies or use.role not in _MIN_RETENTION:
        return None
    min_ms, limit = _MIN_RETENTION[use.role]
    limits = {name: topic.int_setting(name) for name in ("retention.ms", "retention.bytes")}
    evidence = ", ".join(f"{name} = {value:,}" for name, value in limits.items() if value is not None and value >= 0)
    retentions_ms = [limits["retention.ms"]]
    load = cluster.inputs.load_of(cluster.inputs.loads) if use.role is TopicRole.RECORDS else None
    if load is not None and (max_bytes := limits["retention.bytes"]) is not None and max_bytes >= 0:
        retentions_ms.append(int(max_bytes * topic.partitions / load.bytes_s * 1000))
    retention_ms = min((value for value in retentions_ms if value is not None and value >= 0), default=_UNLIMITED_MS)
    if "delete" not in topic.cleanup_policies or retention_ms >= _UNLIMITED_MS:
        return Finding(HOLDS, "Kafka deletes nothing by itself", line=use.line)
    limit = limit.format(duration_text(retention_ms / 1000))
    if retention_ms >= min_ms:
        return Finding(LIMITED, evidence, limit, line=use.line)
    remedy = f"Keep records for {duration_text(min_ms / 1000)} at least: {_ALTER} retention.ms=604800000"
    return Finding(WARNS, evidence, limit, remedy, use.line)


def _check_compaction(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D38: compacted topics, which reject records without a key; the marker topic must be compacted."""
    uses = [(use, cluster.topics[use.name]) for use in cluster.topic_uses if use.name in cluster.topics]
    all_readable = uses and all(topic.cleanup_policies for _, topic in uses)
    default = Finding(HOLDS, "markers are compacted, and nothing else is") if all_readable else None
    findings = ((use.name, _compaction_finding(use, topic)) for use, topic in uses)
    yield from _merge_topics(cluster, findings, default)


def _compaction_finding(use: TopicUse, topic: TopicState) -> Finding | None:
    evidence, delete = f"cleanup.policy = {','.join(sorted(topic.cleanup_policies))}", f"{_ALTER} cleanup.policy=delete"
    if use.role is TopicRole.MARKERS:
        return _marker_topic_finding(use, topic, evidence)
    if "compact" not in topic.cleanup_policies:
        return None
    if use.role is TopicRole.DEAD_LETTERS:
        return Finding(BROKEN, evidence, "the first dead letter, at which the line stops (TL-K71)", delete)
    if use.role is TopicRole.RECORDS and not use.keyed:
        evidence, remedy = f"{evidence}, and a route has no key", f"Set a key for the route, or: {delete}"
        return Finding(BROKEN, evidence, "never: Kafka accepts no record without a key there", remedy)
    return Finding(LIMITED, evidence, "another record with the same key arrives")


def _marker_topic_finding(use: TopicUse, topic: TopicState, evidence: str) -> Finding | None:
    if not topic.is_planned:
        if topic.cleanup_policies and topic.cleanup_policies != {"compact"}:
            limit = "a marker is deleted, after which the line stops (TL-K10)"
            return Finding(BROKEN, evidence, limit, f"{_ALTER} cleanup.policy=compact")
        if topic.partitions < use.partitions:
            evidence = f"{topic.partitions} partitions, parallelism = {use.partitions}"
            remedy = f"kafka-topics.sh --bootstrap-server SERVERS --alter --topic TOPIC --partitions {use.partitions}"
            return Finding(BROKEN, evidence, "never: the line does not start (TL-K22)", remedy)
    return None


_ID_DENIED: Final = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"


def _check_rights(cluster: ClusterProbe) -> Iterator[Finding]:
    """TL-D39: ACL operations of this user, as reported by Kafka (KIP-430) or by a failed probe."""
    findings = [*_merge_topics(cluster, _topic_rights(cluster))]
    for writer in cluster.writers:
        if cluster.begin_errors.get(writer.probe_id, ("", ""))[0] == _ID_DENIED:
            evidence = f"transactional id {writer.probe_id} is not authorized; an ACL for {writer.prefix} covers it"
            limit = "never, unless each id is granted by its full name"
            remedy = f"{_ACL} --operation Write --operation Describe --resource-pattern-type prefixed "
            remedy = f"{remedy.replace('SERVERS', cluster.servers)}--transactional-id {writer.prefix}"
            findings.append(Finding(WARNS, evidence, limit, remedy, writer.line))
    if not cluster.broker_settings:
        evidence = "DescribeConfigs on the cluster is not granted: transaction.max.timeout.ms and others can't be read"
        remedy = f"{_ACL} --operation DescribeConfigs --cluster, for the user that runs doctor."
        findings.append(Finding(UNKNOWN, evidence, remedy=remedy.replace("SERVERS", cluster.servers)))
    yield from findings or [Finding(HOLDS, "this user has all rights on the lines' topics")]


def _topic_rights(cluster: ClusterProbe) -> Iterator[tuple[str, Finding]]:
    for name in dict.fromkeys(use.name for use in cluster.topic_uses):
        uses = [use for use in cluster.topic_uses if use.name == name]
        operations = sorted({operation for use in uses for operation in use.operations})
        options = " ".join(f"--operation {operation.title()}" for operation in operations)
        topic = cluster.topics.get(name)
        if name in cluster.described_topics and topic is None:
            if any(use.required for use in uses):
                remedy = f"{_ACL} {options} --operation DescribeConfigs --topic TOPIC"
                yield name, Finding(BROKEN, "Describe is not granted", "never", remedy)
        elif topic is None or topic.is_planned:
            if is_kind(cluster.create_errors.get(name, ("", ""))[0], ErrorKind.ACCESS_RIGHTS):
                remedy = f"{_ACL} --operation Create --topic TOPIC; or create it manually."
                yield name, Finding(BROKEN, "Create is not granted, and it is missing", "never", remedy)
        elif denied_operations := set(operations).difference(
            operations if topic.allowed_operations is None else topic.allowed_operations
        ):
            operation_names = " and ".join(operation.title() for operation in sorted(denied_operations))
            limit = "never: the line stops at its first batch"
            yield name, Finding(BROKEN, f"{operation_names} not granted", limit, f"{_ACL} {options} --topic TOPIC")
        elif topic.settings is None:
            evidence = "DescribeConfigs not granted: its limits can't be read, by doctor and by the line"
            yield name, Finding(UNKNOWN, evidence, remedy=f"{_ACL} --operation DescribeConfigs --topic TOPIC")


CHECKS: Final = (
    Check("TL-D25", "Kafka answers", _check_reachable),
    Check("TL-D26", "topics", _check_topics),
    Check("TL-D27", "loss of a broker", _check_replicas),
    Check("TL-D28", "in-sync replicas", _check_in_sync),
    Check("TL-D30", "unclean leader election", _check_unclean_election),
    Check("TL-D31", "transactions", _check_transactions),
    Check("TL-D33", "large messages", _check_record_size),
    Check("TL-D34", "retention", _check_retention),
    Check("TL-D38", "compaction", _check_compaction),
    Check("TL-D39", "rights", _check_rights),
)
