"""What the name of a master says of where tasks run."""

from __future__ import annotations

import pytest

from towline.spark.session import addresses, brings_a_secret, is_cluster, shares_files, stays_here


@pytest.mark.parametrize(
    ("master", "cluster", "files", "here", "secret"),
    [
        ("local", False, True, True, True),
        ("local[*]", False, True, True, True),
        ("local[4,3]", False, True, True, True),
        ("local-cluster[2,1,512]", True, True, True, False),
        ("spark://127.0.0.1:7077", True, False, True, False),
        ("spark://localhost:7077,127.0.0.1:7078", True, False, True, False),
        ("spark://[::1]:7077", True, False, True, False),
        ("spark://m1:7077", True, False, False, False),
        ("spark://127.0.0.1:7077,m2:7077", True, False, False, False),
        ("yarn", True, False, False, True),
        ("k8s://https://api:443", True, False, False, False),
    ],
)
def test_each_kind_of_master(master: str, *, cluster: bool, files: bool, here: bool, secret: bool) -> None:
    said = (is_cluster(master), shares_files(master), stays_here(master), brings_a_secret(master))
    assert said == (cluster, files, here, secret)


@pytest.mark.parametrize(
    ("master", "found"),
    [
        ("local[2]", []),
        ("yarn", []),
        ("spark://m1:7077", [("m1", 7077)]),
        ("spark://[::1]:7077,m2:7078", [("::1", 7077), ("m2", 7078)]),
        ("spark://m1", []),
    ],
)
def test_the_addresses_of_standalone_masters(master: str, found: list[tuple[str, int]]) -> None:
    assert addresses(master) == found
