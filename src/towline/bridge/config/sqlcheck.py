"""The SQL of a bridge file, judged by Spark's own parser and analyzer, without a session.

A session takes seven seconds and a checkpoint; Catalyst alone takes two, or nothing where its JVM runs anyway.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.downlink import FailureNotice, Sql
from towline.bridge.config.file import discreet
from towline.bridge.config.mistakes import ConfigMistakes, Mistakes
from towline.bridge.config.places import Document, KeyPath
from towline.errors import ConfigError, SetupError, did_you_mean
from towline.guarantee import Guarantee
from towline.schema import SPARK_SCHEMA
from towline.spark.java import OLDEST_JAVA, find_java
from towline.spark.quickstart import is_light

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge, Dedupe, DownLine, Line

__all__ = ["SESSION_SQL", "Findings", "SqlExpression", "examine", "expressions_of", "judge"]

#: Columns of Spark's Kafka source (`towline.bridge.downlink.sql.COLUMNS`).
KAFKA_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
#: In place of a type, where every type will do.
ANY: Final = "*"
#: What the bridge's session sets of Spark SQL; `towline.bridge.runtime.driver.session` says why.
SESSION_SQL: Final = {"spark.sql.ansi.enabled": "false", "spark.sql.session.timeZone": "UTC"}

#: Keys of a downlink that may be said in SQL, and the type each is cast to; a condition has none.
_DOWN: Final = {
    "topic": "STRING",
    "retain": "BOOLEAN",
    "expiry": "BIGINT",
    "content_type": "STRING",
    "response_topic": "STRING",
    "correlation_data": "BINARY",
    "payload": "BINARY",
}
#: Settings that may bring functions and tables which only a session knows.
_EXTENDED: Final = ("spark.sql.extensions", "spark.plugins", "spark.sql.catalog", "spark.jars")
#: Variables that name a Spark, or settings of it, which are not ours to read.
_ELSEWHERE: Final = ("SPARK_HOME", "SPARK_CONF_DIR")
#: What Spark says where it lacks a name; with a transform or an extension the name may be there.
_NAMES: Final = re.compile(r"UNRESOLVED_|UNSUPPORTED_CALL|TABLE_OR_VIEW_NOT_FOUND|\w+_NOT_LOADED_")
_SPARK: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s+(.*?)(?:\s+SQLSTATE: \w+|$)", re.DOTALL)
_LONGEST: Final = 300
_START_S: Final = 60


@dataclass(frozen=True, slots=True)
class SqlExpression:
    """One expression of the file.

    Attributes:
        line: Name of its line.
        path: Where it stands.
        subject: The table, for a message.
        sql: As written.
        schema: Columns it may name, as DDL.
        kind: Type it is cast to; "" for a condition, `ANY` for a field, which has the type it has.
        sure: Whether all names it may use are known without a session.
        repeats: What may go wrong where it gives another value the second time; "" for nothing.
        fields: Names it may use beside those of the schema, each with its SQL, in order.
    """

    line: str
    path: KeyPath
    subject: str
    sql: str
    schema: str
    kind: str
    sure: bool
    repeats: str = ""
    fields: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Findings:
    """What looking at a file's SQL gave.

    Attributes:
        verdict: One line: by whom it was judged, or why not; "" for a file without SQL.
        warnings: What is allowed and yet deserves a thought.
    """

    verdict: str = ""
    warnings: list[str] = field(default_factory=list)


def expressions_of(bridge: Bridge, environ: Mapping[str, str] = os.environ) -> list[SqlExpression]:
    """Every expression of a bridge, in the order of its lines.

    Args:
        bridge: What the file says.
        environ: Of whoever judges.
    """
    elsewhere = any(name in environ and not is_light(environ[name]) for name in _ELSEWHERE)
    plain = not elsewhere and not any(name.startswith(_EXTENDED) for name in bridge.spark.conf)
    ups = (_up(line, ("uplink", index), sure=plain) for index, line in enumerate(bridge.uplinks))
    downs = (_down(line, ("downlink", index), sure=plain) for index, line in enumerate(bridge.downlinks))
    return list(chain(*ups, *downs))


def _up(line: Line, path: KeyPath, *, sure: bool) -> Iterator[SqlExpression]:
    subject = f'uplink "{line.name}"'
    strict = line.guarantee is Guarantee.EXACTLY_ONCE
    apart = "a message could then be in Kafka twice, or not at all" if strict and line.parallelism > 1 else ""
    twice = "a repeat would not be recognised"

    def key(
        dedupe: Dedupe | None, here: KeyPath, about: str, fields: tuple[tuple[str, str], ...] = ()
    ) -> Iterator[SqlExpression]:
        if dedupe is not None and "{" not in dedupe.key:
            place = (*here, "dedupe", "key")
            yield SqlExpression(line.name, place, about, dedupe.key, SPARK_SCHEMA, "STRING", sure, twice, fields)

    yield from key(line.dedupe, path, subject)
    for number, section in enumerate(line.sections):
        here, about = (*path, "route", number), f"{subject} route {number + 1}"
        fields = tuple(section.fields.items())
        for index, (name, text) in enumerate(fields):
            place = (*here, "fields", name)
            yield SqlExpression(line.name, place, about, text, SPARK_SCHEMA, ANY, sure, apart, fields[:index])
        for name, said, kind in (("where", section.where, ""), ("reject", section.reject, "STRING")):
            if said is not None:
                yield SqlExpression(line.name, (*here, name), about, said, SPARK_SCHEMA, kind, sure, apart, fields)
        yield from key(section.dedupe, here, about, fields)


def _down(line: DownLine, path: KeyPath, *, sure: bool) -> Iterator[SqlExpression]:
    section, subject = line.section, f'downlink "{line.name}"'
    sure = sure and section.transform is None
    # The outbox knows the rows of an interrupted batch by their number [I10].
    moved = "a record of a batch that a crash interrupted could be sent twice, or not at all"
    fields = tuple(section.fields.items())
    one = SqlExpression(line.name, path, subject, "", KAFKA_SCHEMA, "", sure, moved, fields)
    for index, (name, said) in enumerate(fields):
        yield replace(one, path=(*path, "fields", name), sql=said, kind=ANY, fields=fields[:index])
    if section.where is not None:
        yield replace(one, path=(*path, "where"), sql=section.where)
    if section.reject is not None:
        yield replace(one, path=(*path, "reject"), sql=section.reject, kind="STRING")
    if section.failure_notice is not None:
        about = replace(one, path=(*path, "failure_notice"), schema=f"{KAFKA_SCHEMA}, fault string", repeats="")
        yield from _notice(section.failure_notice, about)
    for key, kind in _DOWN.items():
        if isinstance(value := getattr(section, key), Sql):
            yield replace(one, path=(*path, key, "sql"), sql=value.sql, kind=kind)


def _notice(notice: FailureNotice, one: SqlExpression) -> Iterator[SqlExpression]:
    if notice.where is not None:
        yield replace(one, path=(*one.path, "where"), sql=notice.where)
    said: list[tuple[KeyPath, Any]] = [((key,), getattr(notice, key)) for key in ("topic", "key", "payload")]
    said += [(("headers", name), value) for name, value in notice.headers.items()]
    for key, value in said:
        if isinstance(value, Sql):
            yield replace(one, path=(*one.path, *key, "sql"), sql=value.sql, kind="BINARY")


class _Catalyst:
    """Spark's parser and analyzer in a JVM.

    Args:
        jvm: py4j's view of a JVM with Spark's jars.
        conf: Settings of Spark SQL; those of this thread, until a session is made.
    """

    def __init__(self, jvm: Any, conf: Mapping[str, object]) -> None:
        self._scala = jvm.scala
        self._seq = jvm.org.apache.spark.api.python.PythonUtils
        self._java = jvm.java
        self._sql = jvm.org.apache.spark.sql
        self._catalyst = catalyst = self._sql.catalyst
        settings = self._sql.internal.SQLConf.get()
        for name, value in conf.items():
            try:
                settings.setConfString(name, str(value).lower() if isinstance(value, bool) else str(value))
            except Exception as error:  # noqa: BLE001 - as below
                raise ConfigError("TL-C74", "[spark.conf]", f"{name}: {_sentence(error)[1]}", "Correct it.") from None
        self._functions = _object(catalyst.analysis, "FunctionRegistry").builtin()
        hadoop = jvm.org.apache.hadoop.conf.Configuration(False)
        catalog = catalyst.catalog.InMemoryCatalog(jvm.org.apache.spark.SparkConf(False), hadoop)
        self._analyzer = catalyst.analysis.Analyzer(catalyst.catalog.SessionCatalog(catalog, self._functions))
        self._parser = _object(catalyst.parser, "CatalystSqlParser")
        self._none = _object(jvm.scala, "None")
        self._variables = self._sql.internal.VariableSubstitution()

    def deterministic(self, one: SqlExpression) -> bool:
        """Whether an expression gives the same again for the same row.

        Raises:
            ConfigError: What is wrong with it; without a place.
        """
        try:
            parsed = self._parser.parseExpression(self._variables.substitute(one.sql))
            unknown = next(self._unknown(parsed), None) if one.sure else None
            if unknown is None:
                return self._analyzed(parsed, one)
        except Exception as error:  # noqa: BLE001 - PySpark raises others for Java's than py4j alone
            if (problem := _problem(error, one)) is not None:
                raise problem from None
            return True
        names = re.findall(r"(\w+)`?(?:,|$)", self._functions.listFunction().mkString(","))
        what = f'Spark has no function "{unknown}"'
        raise ConfigError("TL-C74", "", what, did_you_mean(unknown, names, "Correct it."))

    def _analyzed(self, parsed: Any, one: SqlExpression) -> bool:
        if one.kind == ANY:
            parsed = self._catalyst.expressions.IsNotNull(parsed)
        elif one.kind:
            kind = self._parser.parseDataType(one.kind)
            expressions = self._catalyst.expressions
            parsed = expressions.IsNotNull(expressions.Cast(parsed, kind, self._none))
        filtered = self._catalyst.plans.logical.Filter(parsed, self._with_fields(self._relation(one.schema), one))
        plan = self._analyzer.executeAndCheck(filtered, self._catalyst.QueryPlanningTracker(self._none))
        return bool(plan.deterministic())

    def _relation(self, schema: str) -> Any:
        attributes = _object(self._catalyst.types, "DataTypeUtils").toAttributes(
            self._sql.types.StructType.fromDDL(schema)
        )
        nothing = _object(self._scala.collection.immutable, "Nil")
        return self._catalyst.plans.logical.LocalRelation(attributes, nothing, False, self._none)

    def _with_fields(self, relation: Any, one: SqlExpression) -> Any:
        """The relation with a column more for each field."""
        for name, text in one.fields:
            columns = self._java.util.ArrayList()
            for expression in ("*", f"(\n{self._variables.substitute(text)}\n) AS {name}"):
                columns.add(self._parser.parseExpression(expression))
            relation = self._catalyst.plans.logical.Project(self._seq.toSeq(columns), relation)
        return relation

    def _unknown(self, node: Any) -> Iterator[str]:
        """Functions below an expression that Spark does not have; a catalog without functions could not say which."""
        if node.getClass().getSimpleName() == "UnresolvedFunction" and node.nameParts().size() == 1:
            name = str(node.nameParts().head())
            identifier = self._catalyst.FunctionIdentifier(name)
            if not self._functions.functionExists(identifier):
                yield name
        children = node.children()
        for index in range(children.size()):
            yield from self._unknown(children.apply(index))


def _object(package: Any, name: str) -> Any:
    """A Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _problem(error: Exception, one: SqlExpression) -> ConfigError | None:
    """Spark's first sentence; None where only a session can know."""
    name, sentence = _sentence(error)
    if name == "UNSUPPORTED_CALL.WITHOUT_SUGGESTION" or (not one.sure and _NAMES.match(name)):
        return None
    return ConfigError("TL-C74", "", sentence, "Correct it.")


def _sentence(error: Exception) -> tuple[str, str]:
    """Spark's name for an error, "" for none, and its first sentence."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage())
    match = _SPARK.search(text)
    name, sentence = (match[1], match[2]) if match else ("", text)
    return name, " ".join(sentence.split()).rstrip(".")[:_LONGEST]


def judge(bridge: Bridge, jvm: Any, shown: Path | None = None) -> tuple[dict[str, Mistakes], list[str]]:
    """Look at every expression of a bridge.

    Args:
        bridge: What the file says.
        jvm: py4j's view of a JVM with Spark's jars.
        shown: The file as the user wrote it; its whole path by default.

    Returns:
        The mistakes (TL-C74) by line, and warnings.
    """
    expressions = expressions_of(bridge)
    if not expressions:
        return {}, []
    own = {name: value for name, value in bridge.spark.conf.items() if name.startswith("spark.sql.")}
    catalyst = _Catalyst(jvm, {**SESSION_SQL, **own})
    wrong: dict[str, Mistakes] = {}
    warnings: list[str] = []
    fields_wrong: set[KeyPath] = set()
    document = Document.again(bridge.file, shown or bridge.file)
    for one in expressions:
        table = one.path[: 4 if one.path[0] == "uplink" else 2]
        if any((*table, "fields", name) in fields_wrong for name, _ in one.fields):
            continue  # what is made of a mistake is not another one
        try:
            if not catalyst.deterministic(one) and one.repeats:
                warnings.append(f'line "{one.line}": {_key(one)} gives another value each time: {one.repeats}.')
        except ConfigError as error:
            fields_wrong.add(one.path)
            wrong.setdefault(one.line, discreet(document)).add(
                error.code, _place(document, one), one.subject, f"{_key(one)}: {error.what}", error.do
            )
    return wrong, warnings


def _key(one: SqlExpression) -> str:
    """The key as the user wrote it."""
    return ".".join(part for part in one.path[2:] if isinstance(part, str) and part not in ("route", "sql"))


def _place(document: Document, one: SqlExpression) -> KeyPath:
    """Its place among all lines of the file: a driver that is started again has no longer all of them."""
    kind, _, *rest = one.path
    number = document.number(str(kind), one.line)
    return one.path if number is None else (kind, number, *rest)


def examine(bridge: Bridge, shown: Path | None = None) -> Findings:
    """Judge the SQL of a bridge in a JVM of its own; none is started where nothing is said in SQL.

    Args:
        bridge: What the file says.
        shown: The file as the user wrote it; its whole path by default.

    Raises:
        ConfigMistakes: With every mistake in it (TL-C74).
    """
    if not expressions_of(bridge):
        return Findings()
    try:
        with _jvm() as jvm:
            try:
                wrong, warnings = judge(bridge, jvm, shown)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - of Java: it can be asked for its words only as long as that lives
                return Findings(f"not checked: {_sentence(error)[1]}")
    except SetupError as error:
        return Findings(f"not checked: {error.what}")
    except (OSError, ValueError) as error:
        return Findings(f"not checked: Spark's JVM can't be started ({error})")
    if wrong:
        raise ConfigMistakes(error for one in wrong.values() for error in one.found())
    return Findings(f"checked by Spark {version('pyspark')}", warnings)


@contextlib.contextmanager
def _jvm() -> Iterator[Any]:
    """A JVM with Spark's jars, behind a secret, on the loopback address.

    Raises:
        SetupError: There is no Java (TL-S14), or no PySpark (TL-S20).
        OSError: It can't be started.
        ValueError: It ended.
    """
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None:
        raise SetupError("TL-S20", "pyspark", "PySpark is not installed", "Install towline[spark].")
    try:
        java = find_java()
    except SetupError as error:
        raise SetupError(error.code, error.where, f"there is no Java {OLDEST_JAVA} or newer", error.do) from None
    from py4j.java_gateway import GatewayParameters, JavaGateway  # noqa: PLC0415 - PySpark brings it

    command = [
        *(str(java), "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Xmx512m"),
        *("-cp", str(Path(spark.origin).parent / "jars" / "*"), "py4j.GatewayServer"),
        *("--die-on-broken-pipe", "--enable-auth", "0"),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload] # a dict of pipes
        try:
            port, secret = process.stdout.readline().strip(), process.stdout.readline().strip()
            if not secret:
                raise ValueError(f"the JVM ended with code {process.wait(_START_S)}")
            parameters = GatewayParameters(
                port=int(port),
                auth_token=secret,
                auto_field=True,
                enable_memory_management=False,  # Python may find what it made of it when its port is somebody else's
            )
            gateway = JavaGateway(gateway_parameters=parameters)
            try:
                yield gateway.jvm
            finally:
                gateway.close()
        finally:
            process.kill()
