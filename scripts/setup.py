"""Make this machine ready for Towline: `make setup`. One line a thing; what is there already is left alone.

With the word ``test`` it leaves out what it does with ``spark``: `make test` does that beside other things. With
``soak`` it brings the brokers that only long tests need, too.

It needs nothing but Python and, where something is missing, apt with root's rights (sudo if you are not root).
No host is named here: Debian's backports are derived from the machine's own apt sources, Maven and pip use their own
settings.
"""
# ruff: noqa: INP001, T201  a script that talks to a person

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "towline-setup.sha256"
OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 11), (3, 14)
OLDEST_JAVA = 17
OLDEST_MOSQUITTO = (2, 0, 13)
JAVA_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")
POLICY = Path("/usr/sbin/policy-rc.d")
PLAIN = not sys.stdout.isatty() or "NO_COLOR" in os.environ


class Problem(Exception):
    """Something that set-up can't mend; the message says what to do."""


# -- telling ---------------------------------------------------------------------------------------------------------


def sign(mark: str, colour: int) -> str:
    """A mark, coloured on a terminal."""
    with contextlib.suppress(UnicodeEncodeError, LookupError):
        mark.encode(sys.stdout.encoding or "ascii")
        return mark if PLAIN else f"\033[{colour}m{mark}\033[0m"
    return {"✓": "ok", "✗": "FAILED"}.get(mark, "!")


def step(name: str, act: Callable[[], tuple[str, str]]) -> bool:
    """Do one thing and tell it in one line; whether it went well."""
    begun = time.monotonic()
    try:
        text, warning = act()
    except Problem as problem:
        print(f"  {name:<20} {sign('✗', 31)}  {problem}", flush=True)
        return False
    took = time.monotonic() - begun
    print(f"  {name:<20} {sign('✓', 32)} {took:6.1f} s   {text}", flush=True)
    if warning:
        print(f"  {'':<20} {sign('⚠', 33)}  {warning}", flush=True)
    return True


# -- running ---------------------------------------------------------------------------------------------------------


def run(*command: object, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    """Run quietly; on failure show everything it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise Problem(f"`{' '.join(words)}` ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def run_as_root(*command: object, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    """Run with root's rights."""
    if os.geteuid() == 0:
        return run(*command, may_fail=may_fail)
    if shutil.which("sudo") is None:
        raise Problem(f"needs root's rights and there is no sudo. Have it done for you: {' '.join(map(str, command))}")
    return run("sudo", *command, may_fail=may_fail)


def which(program: str) -> str | None:
    """Where a program is; Debian keeps servers where an ordinary user's PATH does not look."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")


# -- apt -------------------------------------------------------------------------------------------------------------


def apt(*words: object, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    """apt-get without questions."""
    if which("apt-get") is None:
        raise Problem(f"no apt-get here. Install by hand: {' '.join(map(str, words))}")
    return run_as_root("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", *words, may_fail=may_fail)


def apt_install(*packages: str) -> None:
    """Install, with fresh lists only where the old ones do not do."""
    words = ["install", "-y", "--no-install-recommends", *packages]
    with no_services():
        if apt(*words, may_fail=True).returncode:
            apt("update", may_fail=True)  # somebody else's broken source is no reason to stop
            apt(*words)


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Debian starts a server as soon as it is installed, unless policy-rc.d forbids it: ours are started by tests."""
    if POLICY.exists():
        yield
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as policy:
        policy.write("#!/bin/sh\nexit 101\n")
        policy.flush()
        run_as_root("install", "-m", "755", policy.name, POLICY)
    try:
        yield
    finally:
        run_as_root("rm", "-f", POLICY)


def backports_sources(texts: dict[str, str], codename: str) -> dict[str, str]:
    """The machine's own apt sources of this release, and beside each its backports.

    Args:
        texts: File name to content, of sources.list and sources.list.d.
        codename: The release, such as ``bookworm``.

    Returns:
        File name to content for a folder of sources; empty where no source names the release.
    """
    result = {}
    for name, text in texts.items():
        rewrite = _stanzas if name.endswith(".sources") else _lines
        kept = rewrite(text, codename)
        if kept:
            result[name if "." in name else f"{name}.list"] = kept
    return result if any(f"{codename}-backports" in text for text in result.values()) else {}


def _lines(text: str, codename: str) -> str:
    """One-line style: ``deb [options] uri suite component...``."""
    kept = []
    for line in text.splitlines():
        entry = re.match(r"^(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+)(\S+)(\s.*)$", line.strip())
        if entry and entry[2].split("-")[0] == codename:
            kept.append(line.strip())
            if entry[2] == codename:
                kept.append(f"{entry[1]}{codename}-backports{entry[3]}")
    return "".join(f"{line}\n" for line in dict.fromkeys(kept))


def _stanzas(text: str, codename: str) -> str:
    """deb822 style: paragraphs with ``Suites:``."""
    kept = []
    for stanza in re.split(r"\n\s*\n", text.strip()):
        suites = re.search(r"^Suites:[ \t]*(.*)$", stanza, re.MULTILINE)
        if suites is None or not any(suite.split("-")[0] == codename for suite in suites[1].split()):
            continue
        names = suites[1].split()
        if codename in names and f"{codename}-backports" not in names:
            names.append(f"{codename}-backports")
        kept.append(stanza[: suites.start(1)] + " ".join(names) + stanza[suites.end(1) :])
    return "".join(f"{stanza}\n\n" for stanza in kept)


def apt_sources() -> dict[str, str]:
    """The machine's apt sources by file name."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    readable = [file for file in files if file.is_file() and file.suffix in {".list", ".sources"}]
    return {file.name: file.read_text(encoding="utf-8", errors="replace") for file in readable}


def install_from_backports(*packages: str) -> str | None:
    """Install from the release's backports, by way of lists of our own; why not, where it can't be."""
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    named = re.search(r"^VERSION_CODENAME=(\w+)$", release, re.MULTILINE)
    sources = backports_sources(apt_sources(), named[1]) if named else {}
    if named is None or not sources:
        return "no apt source of this machine names its own release, so they can't be derived"
    folder = Path(tempfile.mkdtemp(prefix="towline-apt-"))
    try:
        options = private_lists(folder, sources)
        install = ["install", "-y", "--no-install-recommends", "-t", f"{named[1]}-backports", *packages]
        for words in (["update"], install):
            with no_services():
                done = apt(*options, *words, may_fail=True)
            if done.returncode:
                return (done.stderr or done.stdout).strip().splitlines()[-1]
    finally:
        run_as_root("rm", "-rf", folder)
    return None


def private_lists(folder: Path, sources: dict[str, str]) -> list[str]:
    """Options that make apt-get use these sources and lists in `folder`, and leave the machine's own alone."""
    folder.chmod(0o755)  # apt fetches as the user _apt
    (folder / "parts").mkdir()
    (folder / "lists" / "partial").mkdir(parents=True)
    for name, text in sources.items():
        (folder / "parts" / name).write_text(text, encoding="utf-8")
    places = {
        "Dir::Etc::sourcelist": Path("/dev/null"),
        "Dir::Etc::sourceparts": folder / "parts",
        "Dir::State::lists": folder / "lists",
    }
    return [word for key, place in places.items() for word in ("-o", f"{key}={place}")]


# -- the things ------------------------------------------------------------------------------------------------------


def python() -> str:
    """A Python that Towline supports; this one if it is."""
    for name in (sys.executable, "python3.13", "python3.12", "python3.11", "/usr/bin/python3"):
        program = shutil.which(name)
        code = f"import sys; sys.exit(not {OLDEST_PYTHON} <= sys.version_info[:2] < {TOO_NEW_PYTHON})"
        if program and run(program, "-c", code, may_fail=True).returncode == 0:
            return program
    raise Problem("there is no Python 3.11, 3.12 or 3.13 here. Install one and try again")


def virtual_environment() -> tuple[str, str]:
    """.venv with Towline (editable), Spark and the tools of development."""
    wanted = f"{ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes()
    stamp = hashlib.sha256(wanted).hexdigest()
    venv_python = VENV / "bin" / "python"
    there = STAMP.exists() and STAMP.read_text(encoding="ascii") == stamp and (VENV / "bin" / "towline").exists()
    if not there:
        if not venv_python.exists() or run(venv_python, "-m", "pip", "--version", may_fail=True).returncode:
            make_venv(python())
        pip = [venv_python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--upgrade", "pip>=25.1")  # the first that knows --group
        run(*pip, "--editable", f"{ROOT}[spark]", "--group", f"{ROOT / 'pyproject.toml'}:dev")
        STAMP.write_text(stamp, encoding="ascii")
    return run(venv_python, "--version").stdout.strip(), ""


def make_venv(interpreter: str) -> None:
    """A new virtual environment; Debian keeps what it needs in a package of its own."""
    if run(interpreter, "-c", "import ensurepip, venv", may_fail=True).returncode:
        apt_install("python3-venv")
    run(interpreter, "-m", "venv", "--clear", VENV)


def java_version() -> int:
    """The feature release of the java on PATH; 0 when there is none."""
    if which("java") is None:
        return 0
    said = run("java", "-version", may_fail=True)
    match = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(match[1]) if match else 0


def java() -> tuple[str, str]:
    """A Java that Kafka and Spark can run on."""
    for package in JAVA_PACKAGES:
        if java_version() >= OLDEST_JAVA:
            break
        with contextlib.suppress(Problem):
            apt_install(package)
    version = java_version()
    if version < OLDEST_JAVA:
        raise Problem(f"no Java {OLDEST_JAVA} or newer on PATH, and none of {', '.join(JAVA_PACKAGES)} made one appear")
    return f"Java {version}", ""


def maven() -> tuple[str, str]:
    """Maven fetches Kafka's jars."""
    if which("mvn") is None:
        apt_install("maven")
    return str(which("mvn")), ""


def mosquitto_version() -> tuple[int, ...]:
    """The version of the server; empty when there is none."""
    binary = which("mosquitto")
    said = run(binary, "-h", may_fail=True).stdout if binary else ""
    match = re.search(r"mosquitto version (\d+(?:\.\d+)*)", said)
    return tuple(map(int, match[1].split("."))) if match else ()


def mosquitto() -> tuple[str, str]:
    """A Mosquitto that keeps Receive Maximum, and its clients."""
    before, reason = mosquitto_version(), None
    if before < OLDEST_MOSQUITTO:
        reason = install_from_backports("mosquitto", "mosquitto-clients")
        if not mosquitto_version():
            apt_install("mosquitto")
        if not before:
            never_at_boot("mosquitto")
    if which("mosquitto_pub") is None:
        apt_install("mosquitto-clients")
    version = mosquitto_version()
    if not version:
        raise Problem("Mosquitto could not be installed. Install 2.0.13 or newer by hand")
    name = "Mosquitto " + ".".join(map(str, version))
    if version >= OLDEST_MOSQUITTO:
        return name, ""
    why = "it ignores Receive Maximum and loses QoS 2 messages by itself; figures taken on it say little"
    return name, f"older than 2.0.13: {why}. Backports: {reason}"


def never_at_boot(service: str) -> None:
    """We asked for a program, not for a service of this machine."""
    if Path("/run/systemd/system").is_dir():
        run_as_root("systemctl", "disable", "--now", service, may_fail=True)


def helpers() -> tuple[str, str]:
    """Tools for faults and independent reading; tests without them are skipped."""
    programs = ("strace", "kcat", "prometheus", "chromium")
    missing = [program for program in programs if which(program) is None]
    refused = []
    for program in missing:
        try:
            apt_install(program)
        except Problem:
            refused.append(program)
    if "prometheus" in missing and "prometheus" not in refused:
        for service in ("prometheus", "prometheus-node-exporter"):
            never_at_boot(service)
    warning = f"{' and '.join(refused)} can't be installed; tests that need them are skipped" if refused else ""
    return ", ".join(programs) if not refused else "some are missing", warning


def other_brokers() -> tuple[str, str]:
    """RabbitMQ and ejabberd, which some long tests meet; without them these tests are skipped."""
    programs, erlang = {"rabbitmq-server": "rabbitmq-server", "ejabberd": "ejabberdctl"}, which("erl")
    missing = [name for name, program in programs.items() if which(program) is None]
    if missing:
        try:
            apt_install(*missing)
        except (Problem, OSError) as problem:
            why = str(problem).strip().splitlines()[-1]
            return "not both here", f"{' and '.join(missing)} can't be installed, tests that need them skip: {why}"
        for service in (*missing, *(() if erlang else ("epmd.socket", "epmd"))):
            never_at_boot(service)
    return ", ".join(programs), ""


def prepared(code: str) -> str:
    """Run code of Towline in the new environment; what it prints."""
    body = textwrap.indent(code.strip(), "    ")
    refused = "except SetupError as error:\n    raise SystemExit(str(error))\n"
    guarded = f"from towline.errors import SetupError\ntry:\n{body}\n{refused}"
    done = run(VENV / "bin" / "python", "-c", guarded, may_fail=True)
    if done.returncode:
        raise Problem(done.stderr.strip())
    return done.stdout.strip()


def kafka() -> tuple[str, str]:
    """Kafka's jars and an archive of its classes."""
    code = """
from towline_prove.devstack.kafka import KAFKA_VERSION, prepare_kafka
jars = prepare_kafka()
print(f"Kafka {KAFKA_VERSION} ({len(list(jars.glob('*.jar')))} jars), its classes archived in {jars.parent}")
"""
    return prepared(code), ""


def spark() -> tuple[str, str]:
    """An archive of the classes that Spark loads, for starts in half the time, and a quicker way to its checkpoints."""
    code = """
import pyspark
from towline.spark.java import create_spark_archive, download_local_fs
home = create_spark_archive()
download_local_fs()
print(f"PySpark {pyspark.__version__}, {f'its classes archived in {home}' if home else 'no archive of its classes'}")
"""
    return prepared(code), ""


STEPS = {
    "virtual environment": virtual_environment,
    "Java": java,
    "Maven": maven,
    "Mosquitto": mosquitto,
    "helpers": helpers,
    "Kafka": kafka,
}
FOR_SOAK = {"other brokers": other_brokers}
#: Takes as long as all others: `make test` does it beside what needs no Spark.
LAST = {"Spark": spark}
PARTS = {"all": STEPS | LAST, "test": STEPS, "spark": LAST, "soak": STEPS | LAST | FOR_SOAK}


def main() -> int:
    """Do every step of a part; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, default="all")
    arguments = parser.parse_args()
    begun = time.monotonic()
    print(f"{sign('▸', 36)} set-up", flush=True)
    for name, act in PARTS[arguments.part].items():
        if not step(name, act):
            return 1
    print(f"  {'ready':<20} {sign('✓', 32)} {time.monotonic() - begun:6.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
