"""Real brokers for tests, each on a free port and in a directory of its own: two runs get along side by side."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest

import tests.engines.mqtt3  # noqa: F401 - a server's half of MQTT 3.x
from tests.engines.erlang import Ejabberd, RabbitMQ
from tests.helpers import lacking, ptrace_works
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.devstack import Kafka, Mosquitto, MosquittoTooOld
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto, version_problem
from towline_prove.devstack.spark import enable_fast_start
from towline_prove.evidence import append_record, revision, run_record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MARKER_OF_FIXTURE = {
    "mosquitto": "broker",
    "new_mosquitto": "broker",
    "rabbitmq": "long",
    "ejabberd": "long",
    "kafka": "kafka",
    "own_kafka": "kafka",
    "topic": "kafka",
    "spark": "spark",
    "ptrace": "faults",
}

#: The directory of the Kafka that all workers of a run share.
SHARED_KAFKA = "TOWLINE_TESTS_KAFKA"
ROOT = Path(__file__).parents[1]
#: A test, or a fixture of its file, that asks for the session of Spark that a worker has.
IN_SPARK = re.compile(r"^(?:def test_\w+|@pytest\.fixture.*\ndef \w+)\([^)]*\bspark\b", re.MULTILINE)

_numbers = itertools.count(1)


class NewTopic(Protocol):
    """Creates a topic with a name no other test uses."""

    def __call__(self, hint: str = "topic", partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        """The name of the new topic."""


class NewMosquitto(Protocol):
    """Starts one more Mosquitto, which is stopped after the test."""

    def __call__(self, **settings: str) -> Mosquitto:
        """A running broker with these lines in its configuration."""


# How long an example takes says something of the machine, not of the code; `make soak` and `make fuzz` have the many.
hypothesis.settings.register_profile("towline", deadline=None, max_examples=20)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "towline"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Long tests are evidence: `--proof docs/proof/tests.jsonl` keeps a line for each that ran."""
    parser.addoption("--proof", type=Path, metavar="FILE", help="add a line of JSON to FILE for each long test")
    parser.addoption("--pictures", type=Path, metavar="DIR", help="keep pictures of the page in DIR")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record a long test that ran to its end, with what it adds by `record_property`: a seed, counts."""
    report = yield
    file = item.config.getoption("--proof")
    if file is not None and report.when == "call" and not report.skipped and item.get_closest_marker("long"):
        details = {"test": item.nodeid, **dict(report.user_properties)}
        append_record(run_record("test", ok=report.passed, seconds=report.duration, details=details), file)
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Every Spark that a test starts, itself or through a bridge, starts quickly; and Ctrl-C ends what tests start."""
    if config.getoption("--proof") is not None:
        revision()  # what is put to the proof is the code of the beginning, whatever is committed meanwhile
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a script's job &; all that is started here would have it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # it has its environment from the one that started it
    os.environ[SHARED_KAFKA] = tempfile.mkdtemp(prefix="towline-kafka-")
    with contextlib.suppress(SetupError):  # no Java: the tests that need it say so
        enable_fast_start()


def pytest_unconfigure() -> None:
    """End the Kafka that a test of this run has started."""
    if "PYTEST_XDIST_WORKER" in os.environ or SHARED_KAFKA not in os.environ:
        return
    place = Path(os.environ.pop(SHARED_KAFKA))
    Kafka(place / "kafka").stop()
    shutil.rmtree(place, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, all files with tests in a session of Spark go to one worker: one JVM, and a warm one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - where xdist is

    files = (ROOT / "tests" / "integration").rglob("test_*.py")
    in_spark = {file.relative_to(ROOT).as_posix() for file in files if IN_SPARK.search(file.read_text())}
    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda nodeid: "spark" if file_of(nodeid) in in_spark else file_of(nodeid)
    return scheduling


def pytest_report_header() -> list[str]:
    """Which brokers the tests meet, and what is wrong with them."""
    lines = []
    for name, describe in (("mosquitto", _mosquitto), ("java", lambda: str(find_java()))):
        try:
            lines.append(f"{name}: {describe()}")
        except SetupError as error:
            lines.append(f"{name}: {error}")
    return lines


def _mosquitto() -> str:
    installed = find_mosquitto()
    return version_problem(installed) or ".".join(map(str, installed.version))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the marker of the brokers it asks for: `-m "not kafka"` then needs no memory of ours."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            marker = MARKER_OF_FIXTURE.get(fixture)
            if marker:
                item.add_marker(marker)


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the user's state directory, nor sees another's; most make none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{next(_numbers)}"))


@pytest.fixture
def new_mosquitto(tmp_path: Path) -> Iterator[NewMosquitto]:
    """Start as many brokers as the test needs: `new_mosquitto(persistence="true")`."""
    with contextlib.ExitStack() as brokers:

        def start(**settings: str) -> Mosquitto:
            require(find_mosquitto)
            broker = Mosquitto(tmp_path / f"mosquitto-{next(_numbers)}", settings=settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MosquittoTooOld)  # the header of the report says it
                return brokers.enter_context(broker)

        yield start


@pytest.fixture
def mosquitto(new_mosquitto: NewMosquitto) -> Mosquitto:
    """A running Mosquitto with its own defaults, for this test alone."""
    return new_mosquitto()


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A running RabbitMQ, which speaks MQTT 3.1.1 without QoS 2; shared: use topics and client ids of your own."""
    require(RabbitMQ.find)
    with RabbitMQ(tmp_path_factory.mktemp("rabbitmq")) as broker:
        yield broker


@pytest.fixture(scope="session")
def ejabberd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ejabberd]:
    """A running ejabberd, which speaks MQTT 5 and keeps sessions in memory; shared as `rabbitmq` is."""
    require(Ejabberd.find)
    with Ejabberd(tmp_path_factory.mktemp("ejabberd"), settings={"max_queue": "5000"}) as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka() -> Kafka:
    """A running Kafka, shared by all tests and workers: use topics of `topic`, and leave it running."""
    require(find_java)
    require(kafka_jars)
    return Kafka(Path(os.environ[SHARED_KAFKA]) / "kafka").start()


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[Kafka]:
    """A running Kafka for this test alone, to be killed and paused; costs some 3 s."""
    require(find_java)
    require(kafka_jars)
    with Kafka(tmp_path / "kafka") as broker:
        yield broker


@pytest.fixture
def topic(kafka: Kafka, request: pytest.FixtureRequest) -> NewTopic:
    """Create topics on the shared Kafka: `topic()`, `topic("marker", 1, {"cleanup.policy": "compact"})`."""
    test = re.sub(r"[^A-Za-z0-9._-]", "_", request.node.name)[:100]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")

    def create(hint: str = "topic", partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{hint}.{test}.{worker}{next(_numbers)}"
        kafka.create_topics({name: partitions}, config)
        return name

    return create


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark of a worker, for all rooms: two cores, Kafka's connector, the settings a user has.

    Three attempts a task, so that a failed one is really tried again. A room that wants other settings, or formats,
    has a fixture of the same name that gives them to this session.
    """
    require(find_java)
    import pyspark.accumulators  # noqa: PLC0415 - most workers' tests need none
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from towline.spark.java import local_fs_settings, spark_kafka_conf  # noqa: PLC0415
    from towline.spark.session import spark_conf  # noqa: PLC0415

    # The end of a connection from the JVM would be told with a traceback, in the output of whatever test runs then.
    pyspark.accumulators.AccumulatorTCPServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Workers of Spark import classes of the tests, and the product they belong to.
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    settings: dict[str, bool | float | int | str | None] = {
        **spark_conf(),
        **spark_kafka_conf(),
        **local_fs_settings(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": os.fspath(Path(tempfile.gettempdir()) / "towline-no-warehouse"),
        "spark.executorEnv.TOWLINE_TEST_USER": "u",
        # A machine that was suspended for two minutes would cost the JVM, as `towline.bridge.runtime.session` says.
        "spark.storage.blockManagerHeartbeatTimeoutMs": "365d",
        "spark.log.level": "OFF",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark leaves the sockets of its JVM to the end
        session = SparkSession.builder.master("local[2,3]").appName("towline-tests").config(map=settings).getOrCreate()
        yield session
        # A JVM that has ended has nothing to stop; the test that wanted it says so.
        with contextlib.suppress(ConnectionError, Py4JError):
            session.stop()


@pytest.fixture
def stack_programs() -> None:
    """The test needs what a stack starts: Mosquitto, and Kafka with its Java."""
    for find in (find_mosquitto, find_java, kafka_jars):
        require(find)


@pytest.fixture
def ptrace() -> None:
    """The test needs strace on a child of ours."""
    if not ptrace_works():
        lacking("strace is missing or may not trace here")


def require(find: Callable[[], object]) -> None:
    """Skip the test if this machine lacks what that finds."""
    try:
        find()
    except SetupError as error:
        lacking(str(error))
