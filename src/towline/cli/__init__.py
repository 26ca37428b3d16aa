"""Command line ``towline COMMAND``: one thin module a command, loaded when it is called.

A command's module has a function of the command's name, whose docstring is its help and ends with an example; or, for a
command with subcommands, ``app``, a typer application. The table of commands is here, so that ``towline --help`` loads
none of them and is fast; a command's dependencies are loaded when it is called, so that its own help is fast too.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from towline.errors import ConfigError, SetupError, StateAccessDenied, TowlineError, did_you_mean
from towline.text import error_text, fit_terminal, printable
from towline.version import release

EXIT_FAILED = 1
EXIT_CONFIG = 2
#: This user has no permission to read the command's state.
EXIT_NOT_ALLOWED = 4
#: Exit code of a process that Ctrl-C ended, as shells report it.
EXIT_INTERRUPTED = 130

#: Command → its line of help; "" if another command's line mentions it. Its module is in this package and has its
#: name, unless `_MODULES` names another.
COMMANDS = {
    "init": "a first bridge file, from five questions",
    "run": "run the lines of a bridge file",
    "reload": "apply the changed file to the running bridge",
    "pause": "pause a line's query, not its intake; also resume, restart",
    "resume": "",
    "restart": "",
    "reset": "reset a line to continue where its gateway's account ends",
    "retire": "retire a line: deliver its messages, end its session, remove it",
    "check": "validate a bridge file and print the plan; no network",
    "doctor": "check which promises broker, Kafka and disk can keep; probes only",
    "explain": "explain the code of an error: cause and remedy; no network",
    "schema": "JSON Schema of the bridge file, for editors",
    "status": "the account of every message: received, waiting, committed",
    "ui": "the page of a bridge in a browser; message: the way of one message",
    "message": "",
    "dlq": "dead letters: show them, and replay the fixed ones",
    "refused": "messages the broker refused: show them, send them again",
    "pub": "publish test messages to an MQTT broker",
    "key": "the key of one publisher with receipts",
    "demo": "real brokers, a bridge, a kill -9 or two; devstack: the brokers",
    "gateway": "run the gateway of one line in the foreground",
    "kafka": "markers of a sink in Kafka: show them, reset them by hand",
    "devstack": "",
}

_LINE_COMMANDS = ("run", "reload", "pause", "resume", "restart", "reset", "retire")
#: Modules of other names; those of the proof harness are never imported by the product.
_MODULES = {
    **dict.fromkeys(_LINE_COMMANDS, "towline.cli.lines"),
    "schema": "towline.cli.check",
    "demo": "towline_prove.cli.demo",
    "devstack": "towline_prove.cli.devstack",
}

_USAGE = "towline COMMAND [OPTIONS]   messages between MQTT and Kafka, each accounted for"
_EXAMPLE = """Example:  towline check bridge.toml && towline run bridge.toml
More:     towline COMMAND --help, towline --version"""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 failed, 2 wrong configuration, usage or installation, 4 no permission.

    Args:
        arguments: Arguments without the program's name; the process's own by default.
    """
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        rows = "\n".join(f"  {command:<12}{text}" for command, text in COMMANDS.items() if text)
        sys.stdout.write(f"{_USAGE}\n\n{rows}\n\n{_EXAMPLE}\n")
        return 0
    if name == "--version":
        sys.stdout.write(f"towline {release()}\n")
        return 0
    if name in COMMANDS:
        return _call_command(name, arguments[1:])
    hint = did_you_mean(name, COMMANDS, "See towline --help.")
    kind = "option" if name.startswith("-") else "command"
    _print_error(f'towline: there is no {kind} "{printable(name)}". {hint}   [TL-C01]')
    return EXIT_CONFIG


def _call_command(name: str, arguments: list[str]) -> int:
    """Call a command; any error is one line on standard error. Return the exit code."""
    try:
        _app(name)(arguments, prog_name=f"towline {name}")
    except SystemExit as end:  # typer ends every command this way
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
    except TowlineError as error:
        _print_error(str(error))
        code = EXIT_CONFIG if isinstance(error, ConfigError | SetupError) else EXIT_FAILED
        return EXIT_NOT_ALLOWED if isinstance(error, StateAccessDenied) else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has gone (`towline status | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get("TOWLINE_DEBUG"):
            raise
        remedy = "This is a fault in Towline; please report it with the output of TOWLINE_DEBUG=1."
        _print_error(str(TowlineError("TL-X01", f"towline {name}", f"unexpected {error_text(error)}", remedy)))
        return EXIT_FAILED
    return 0


def _print_error(text: str) -> None:
    sys.stderr.write(fit_terminal(f"{text}\n", sys.stderr))


def _app(name: str) -> Any:
    """Return the typer application of a command: its module's ``app``, or one made from its function."""
    module = importlib.import_module(_MODULES.get(name, f"towline.cli.{name}"))
    application = getattr(module, "app", None)
    if application is None:
        from towline.cli.screen import command_app  # noqa: PLC0415 - typer is loaded when it is needed

        application, command = command_app(), getattr(module, name.replace("-", "_"))
        text, example, example_text = (inspect.getdoc(command) or "").partition("Example:")
        application.command(help=text, epilog=f"{example}{example_text}")(command)
    return application
