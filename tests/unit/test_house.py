"""House rules that no other tool checks: a class name means one thing, a thread is under guard."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in SOURCES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT / "src").as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


#: Every thread of the product, by its name -> where its work goes when a fault ends it.
THREADS = {
    "commands": "the driver ends, and is started again",
    "end *": "to nobody: a gateway ends when its bridge has",
    "flight-shutdown": "told; its process ends anyway",
    "gateway *": "to the reader",
    "gateway-call": "to the caller",
    "heartbeat": "again",
    "history": "again",
    "keep-gateway": "again",
    "metrics": "again",
    "mqtt *": "to all who wait (Client._end)",
    "network": "again",
    "owner": "again",
    "producer": "to the task",
    "publisher-disk": "to all who wait (Publisher._die)",
    "publisher-mqtt": "to all who wait (Publisher._die)",
    "reload": "told; the bridge goes on as before",
    "serve": "the gateway ends with it",
    "stop": "to nobody: the driver is killed",
    "sync": "to the reader",
    "token-provider": "to who asks for a token",
    "towline-connect": "to who connects",
}
#: What makes a thread, and where it is said that it is under guard.
MAKERS = {"Thread": "towline/threads.py", "Timer": "nowhere", "threading.Condition": "nowhere"}


def test_every_thread_is_under_the_guard_and_listed() -> None:
    made, others, kinds = set(), [], []
    for path, tree in SOURCES.items():
        if "towline_prove" in path.parts:
            continue
        place = path.relative_to(ROOT / "src").as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                kinds += [node.name for base in node.bases if ast.unparse(base).endswith("Thread")]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if (
                isinstance(node.func, ast.Name)
                and called in {"guarded_thread", "call_in_thread"}
                and place != "towline/threads.py"
            ):
                name = node.args[1]
                made.add("".join(map(_literal, name.values)) if isinstance(name, ast.JoinedStr) else _literal(name))
            elif MAKERS.get(ast.unparse(node.func), MAKERS.get(called, place)) != place:
                others.append(f"{place}:{node.lineno}")
    assert others == [], "towline.threads has guarded_thread, and a Condition that a Ctrl-C does not leave locked"
    assert kinds == ["ChildSupervisor"], "its run is the guard, and Supervisor looks whether it lives"
    assert made == set(THREADS)


def _literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "*"
