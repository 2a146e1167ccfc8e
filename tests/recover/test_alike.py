"""Nodes that are not alike are found before anything is trained: by version, by GPUs."""

from __future__ import annotations

from unbroken.recover.node.checks.versions import read_needed
from unbroken.recover.supervise.nodes.alike import find_odd

SAME = {"python": "3.12.1", "torch": "2.11.0"}


def test_the_one_that_differs_is_named() -> None:
    odd = find_odd({"a": SAME, "b": {**SAME, "torch": "2.10.0"}, "c": SAME}, {})
    assert odd is not None and odd.nodes == ("b",)
    assert (
        odd.what == "torch is 2.10.0 there, and 2.11.0 on the others"
        and "Install torch 2.11.0 on b" in odd.hint
    )


def test_a_node_with_fewer_gpus_is_named() -> None:
    odd = find_odd({"a": SAME, "b": SAME}, {"a": 8, "b": 7})
    assert odd is not None and odd.nodes == ("b",) and "7 GPUs there, and 8 on the others" in odd.what


def test_nodes_that_are_alike_pass_and_what_is_not_known_is_no_difference() -> None:
    assert find_odd({"a": SAME, "b": SAME, "c": {}}, {"a": 8, "b": 8}) is None
    assert find_odd({}, {}) is None


def test_a_node_says_what_its_ranks_would_import() -> None:
    found = read_needed()
    assert set(found) == {"python", "unbroken", "torch"} and all(found.values())
