"""Rules are data, and the data is held to its word: each fits its example, and no other rule takes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from unbroken.diagnose import REASONS
from unbroken.diagnose.match.rules import (
    FOLDER,
    Rule,
    RuleSet,
    _PlainMatcher,
    builtin,
    builtin_set,
    compile_safe,
    defaults,
    load,
    xids,
)
from unbroken.diagnose.match.scan import _EXCEPTION
from unbroken.diagnose.match.triggers import TRIGGER, WORDS, Literals
from unbroken.errors import InputError, UnknownKey
from unbroken.progress.records.verdict import HANG, LOSS_SPIKE, UNKNOWN, Action

RULES = builtin()


@pytest.mark.parametrize("rule", RULES, ids=[r.id for r in RULES])
def test_rule_takes_its_example_and_no_other_does(rule: Rule) -> None:
    exception = rule.where == "exception" or bool(_EXCEPTION.match(rule.example))
    if rule.where == "tail":
        best = builtin_set().at_tail(rule.example)
    else:
        best = builtin_set().best(rule.example, exception=exception)
    assert best is not None and best.id == rule.id


LOOKED_FOR = [r for r in RULES if r.where != "tail"]
"""A log's last lines are read whatever they say."""


@pytest.mark.parametrize("rule", LOOKED_FOR, ids=[r.id for r in LOOKED_FOR])
def test_scanner_stops_at_the_example(rule: Rule) -> None:
    assert TRIGGER.search(rule.example.encode(), 0)
    assert Literals([t.encode() for t in WORDS]).search(rule.example.encode(), 0)


@pytest.mark.parametrize("rule", RULES, ids=[r.id for r in RULES])
def test_rule_names_its_source(rule: Rule) -> None:
    assert rule.source.startswith("https://")


def test_every_reason_can_be_found() -> None:
    found = {r.reason for r in RULES if r.reason} | {x.reason for x in xids().values()}
    assert set(REASONS) <= found
    assert {HANG, LOSS_SPIKE} <= found


def test_every_reason_has_its_defaults() -> None:
    table = defaults()
    assert set(table) == set(REASONS) | {HANG, LOSS_SPIKE, UNKNOWN}
    assert {d.action for d in table.values()} <= {a.value for a in Action}
    for name, d in table.items():
        assert d.recoverable == (d.action != "stop"), name


def test_xids_are_told_apart() -> None:
    table = xids()
    assert table[48].reason == table[95].reason == "ECCError" and table[95].cordon
    assert table[94].reason == "ECCError" and not table[94].cordon, "contained: elsewhere is enough"
    assert table[63].role == "context", "63 records a remap that worked; 64 is the one that failed"
    assert table[64].role == "root" and table[74].reason == "NVLinkError"
    assert table[45].role == table[43].role == "cascade"
    codes = [c for entry in tomllib.loads((FOLDER / "xid.toml").read_text()).values() for c in entry["codes"]]
    assert len(codes) == len(set(codes))
    convicting = [x for x in table.values() if x.own_fault]
    assert {x.code for x in convicting} == {13, 31}
    for x in convicting:
        assert compile_safe(x.own_fault, "xid.toml") and x.own_mitigation and x.action == "restart"


def test_re_and_re2_agree() -> None:
    pytest.importorskip("re2")
    rules = [r for r in builtin_set().rules if r.where != "tail"]
    plain = _PlainMatcher([r.regex for r in rules])
    for text in [r.example for r in rules] + [
        "",
        "a" * 3000,
        "step 3 loss: 2.0",
        "x" * 100 + "Error: y",
    ]:
        assert sorted(builtin_set()._match(text)) == plain(text)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "does not compile"),
        ("(a+)+$", "exponential"),
        (r"(\w*)*x", "exponential"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "look-around"),
        ("x*", "fits the empty line"),
    ],
)
def test_unsafe_patterns_are_refused(pattern: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        compile_safe(pattern, "here")


def test_own_rules_are_added_and_replace(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[[rule]]\nid = "our-licence"\nregex = "licence server said no"\nrole = "root"\nreason = "ConnectionError"\n'
        'source = "https://wiki.example.com"\nexample = "ERROR licence server said no"\npriority = 80\n'
    )
    rules = builtin_set().with_rules(load([tmp_path]))
    best = rules.best("the licence server said no", exception=False)
    assert best is not None and best.id == "our-licence"
    assert len(rules.rules) == len(RULES) + 1


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("[[rule]\n", InputError, "cannot read rules"),
        ('[[rule]]\nid = "x"\n', InputError, "lacks regex"),
        ('[[rule]]\nid = "x"\nregexp = "a"\n', UnknownKey, "regex"),
        ('[[rule]]\nid="x"\nregex="a"\nrole="boss"\nsource="s"\nexample="e"\n', InputError, "no role"),
        (
            '[[rule]]\nid="x"\nregex="a"\nrole="root"\nreason="Bad"\nsource="s"\nexample="e"\n',
            InputError,
            "no reason",
        ),
    ],
)
def test_wrong_rules_are_named(tmp_path: Path, text: str, error: type[Exception], says: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(error, match=re.escape(says)):
        load([tmp_path])


def test_a_missing_folder_is_said() -> None:
    with pytest.raises(InputError, match="no rule folder"):
        load(["/nowhere/rules"])


def test_set_without_rules_matches_nothing() -> None:
    assert RuleSet([]).best("RuntimeError: x", exception=True) is None
