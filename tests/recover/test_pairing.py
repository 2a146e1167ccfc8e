"""What a test of two nodes says of their rate: nothing where both are one machine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.recover.supervise.suspects.pairing import PairTests


class Answering:
    """Nodes whose tests pass, at a rate that each asks for in turn."""

    def __init__(self, machines: dict[str, str]) -> None:
        address = SimpleNamespace(address="10.0.0.1", interface="eth0")
        self.nodes = {
            n: SimpleNamespace(
                name=n, facts=SimpleNamespace(boot_id=m, host=m, addresses=[address], visible=())
            )
            for n, m in machines.items()
        }

    async def ask(self, name: str, op: str, **_: Any) -> dict[str, Any]:
        if op == "pair_port":
            return {"port": 4000}
        return {
            "passed": True,
            "received": True,
            "rate": 5e8 if name == "a" else 2e8,
            "why": "",
            "ready_s": 0.1,
        }


@pytest.mark.parametrize(("machines", "rate"), [({"a": "x", "b": "x"}, 0.0), ({"a": "x", "b": "y"}, 2e8)])
def test_virtual_nodes_of_one_machine_have_no_rate(machines: dict[str, str], rate: float) -> None:
    tests = PairTests(Answering(machines), 30.0)  # type: ignore[arg-type]
    (found,) = asyncio.run(tests.run_round([("a", "b")]))
    assert found.passed and found.rate == rate
