"""What is wrong is told before training starts, with what to do: no way to the cluster, no right, no such image."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "kubernetes_asyncio", reason="needs kubernetes_asyncio: pip install -r requirements/all.txt"
)
pytest.importorskip("kmock", reason="needs kmock: pip install -r requirements/all.txt")
pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install -r requirements/all.txt"
)

import kmock

from unbroken.cluster.contract import Cordon, Pending, Request
from unbroken.cluster.kubernetes.cluster import KubernetesCluster
from unbroken.cluster.kubernetes.options import KubernetesOptions
from unbroken.cluster.options import make_options
from unbroken.cluster.registry import make_cluster
from unbroken.errors import DoesNotFit, RunError, UnbrokenError, UsageError

from ...support.kubernetes.api import Object
from ...support.kubernetes.site import IMAGE, KubernetesSite
from ..contract import Watch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesSite]:
    with KubernetesSite(tmp_path_factory.mktemp("site"), ["k0", "k1"], gpus=8) as made:
        yield made


@pytest.fixture(autouse=True)
def cleared(site: KubernetesSite) -> Iterator[None]:
    yield
    site.api.denied.clear()
    site.api.quota.clear()
    for pod in site.pods():
        site.do(lambda p=pod: site.api.delete_pod(p, 1))


def options(site: KubernetesSite, **more: str) -> dict[str, str]:
    return {
        "image": IMAGE, "kubeconfig": str(site.kubeconfig), "python": sys.executable, "grace": "10s", **more,
    }  # fmt: skip


def refuse(site: KubernetesSite, request: Request = Request(1), **more: str) -> UnbrokenError:
    with pytest.raises(UnbrokenError) as error:
        make_cluster("kubernetes", "run-1", options(site, **more)).check(request)
    assert error.value.hint, error.value
    return error.value


def test_all_is_well(site: KubernetesSite) -> None:
    make_cluster("kubernetes", "run-1", options(site, gpus="8")).check(Request(1, 1))
    assert site.pods() == [], "it was only asked"


def test_how_the_cluster_is_reached(
    site: KubernetesSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(UsageError, match="there is no kubeconfig, and this is no pod"):
        make_cluster("kubernetes", "r", {"image": IMAGE}).check(Request(1))
    with pytest.raises(UsageError, match="there is no such kubeconfig"):
        make_cluster("kubernetes", "r", {"image": IMAGE, "kubeconfig": str(tmp_path / "none")}).check(
            Request(1)
        )
    (tmp_path / "bad").write_text("[1, 2")
    with pytest.raises(UsageError, match="cannot be used"):
        make_cluster("kubernetes", "r", {"image": IMAGE, "kubeconfig": str(tmp_path / "bad")}).check(
            Request(1)
        )
    assert "cannot be used" in refuse(site, context="nowhere").message
    (tmp_path / "dead").write_text(site.kubeconfig.read_text().replace(str(site.api.servers[0].port), "1"))
    with pytest.raises(RunError, match="cannot be reached"):
        make_cluster("kubernetes", "r", {"image": IMAGE, "kubeconfig": str(tmp_path / "dead")}).check(
            Request(1)
        )
    with pytest.raises(UsageError, match="no image is named"):
        make_cluster("kubernetes", "r", {"kubeconfig": str(site.kubeconfig)}).check(Request(1))


def test_what_the_api_does_not_allow(site: KubernetesSite) -> None:
    site.api.denied |= {"create pods/exec", "watch pods"}
    error = refuse(site)
    assert "does not let us watch pods, create pods/exec" in error.message
    assert "kubernetes-rbac.yaml" in (error.hint or "")
    site.api.denied.clear()
    assert "no namespace nowhere" in refuse(site, namespace="nowhere").message


def test_what_the_cluster_has_not(site: KubernetesSite) -> None:
    assert (
        "the cluster has 2 nodes with 4 nvidia.com/gpu, the run asks for 3"
        in refuse(site, Request(2, 1), gpus="4").message
    )
    assert "0 nodes with 9" in refuse(site, gpus="9").message
    make_cluster("kubernetes", "run-1", options(site, gpus="9", autoscaled="yes")).check(Request(3))
    site.api.denied.add("list nodes")
    make_cluster("kubernetes", "run-1", options(site, gpus="9")).check(Request(3))  # nobody can tell


def acquire(site: KubernetesSite, request: Request = Request(1), **more: str) -> UnbrokenError:
    async def work() -> None:
        cluster = make_cluster("kubernetes", "run-1", options(site, **more))
        try:
            async with asyncio.timeout(25):
                await cluster.acquire(request)
        finally:
            await cluster.close()

    with pytest.raises(UnbrokenError) as error:
        asyncio.run(work())
    assert all("deletionTimestamp" in p["metadata"] for p in site.pods()), "what was asked for is withdrawn"
    return error.value


def test_an_image_that_cannot_be_pulled_or_has_no_unbroken(site: KubernetesSite) -> None:
    error = acquire(site, image="registry.test/other:2")
    assert "registry.test/other:2 cannot be pulled" in error.message and "imagePullSecrets" in (
        error.hint or ""
    )
    error = acquire(site, python="/usr/bin/python9")
    assert "does not run our program" in error.message and "/usr/bin/python9" in error.message
    error = acquire(site, python="/bin/false")
    assert "does not run our program" in error.message and "that has unbroken" in (error.hint or "")


def test_a_program_that_was_seen_running_and_ends_again_and_again_is_told(
    site: KubernetesSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives long enough to be seen, and never long enough for anything to be started beside it."""
    program = tmp_path / "short"
    program.write_text("#!/bin/sh\nsleep 0.2\nexit 1\n")
    program.chmod(0o755)
    tried = []

    def run_in(item: Object, name: str, argv: list[str]) -> Any:
        tried.append(name)
        raise kmock.KubernetesError(
            status=500, reason="InternalError", message=f"container not found ({name})"
        )

    monkeypatch.setattr(site.api, "run_in", run_in)
    error = acquire(site, python=str(program))
    assert tried and "does not run our program" in error.message and "code 1" in error.message


def test_a_quota_that_is_reached_is_waited_for_and_shown(site: KubernetesSite) -> None:
    site.api.quota["team"] = 1

    async def work() -> None:
        cluster = make_cluster("kubernetes", "run-1", options(site))
        try:
            watch = Watch(cluster)
            asking = asyncio.ensure_future(cluster.acquire(Request(2)))
            while "quota team-quota is reached" not in (pending := await watch.next(Pending)).why:
                continue
            assert "used pods=1" in pending.why
            site.api.quota["team"] = 2
            assert len((await asyncio.wait_for(asking, 25)).nodes) == 2
        finally:
            await cluster.close()

    asyncio.run(work())
    site.api.quota["team"] = 0
    with pytest.raises(DoesNotFit, match="quota team-quota"):
        make_cluster("kubernetes", "run-2", options(site)).check(Request(1))


def test_cordons_are_kept_by_taints_or_a_list_whoever_else_writes(site: KubernetesSite) -> None:
    async def cordon(wanted: str) -> dict[str, Cordon]:
        cluster = make_cluster("kubernetes", "run-1", options(site, cordon=wanted))
        try:
            site.api.conflicts = 2
            await cluster.cordon(Cordon("k0", "unbroken", "XID 79 twice"))
            return dict(await cluster.cordons())
        finally:
            await cluster.release("k0", "unbroken")
            assert not await cluster.cordons()
            await cluster.close()

    assert asyncio.run(cordon("auto"))["k0"].reason == "XID 79 twice"
    assert not site.do(lambda: site.api.find("configmaps")), "a taint was enough"
    site.api.denied.add("patch nodes")
    assert asyncio.run(cordon("auto"))["k0"].reason == "XID 79 twice"
    assert site.do(lambda: site.api.find("configmaps"))
    with pytest.raises(RunError, match="does not let us patch nodes"):
        asyncio.run(cordon("taint"))
    site.api.denied |= {"update configmaps", "create configmaps"}
    with pytest.raises(RunError, match="neither patch nodes nor keep a ConfigMap"):
        asyncio.run(cordon("auto"))


def test_nodes_are_listed_put_out_of_use_and_given_back(site: KubernetesSite) -> None:
    """`unbroken nodes`, without a run and without an image."""
    asked = make_options(KubernetesOptions, {"kubeconfig": str(site.kubeconfig)}, where="here")
    nodes = KubernetesCluster.open_nodes(asked)
    asyncio.run(nodes.cordon(Cordon("k1", "ann", "new cables")))
    lines, cordons = asyncio.run(nodes.list())
    assert (
        set(lines) == {"k0", "k1"}
        and lines["k0"].states == {"ready"}
        and lines["k0"].gres == "nvidia.com/gpu:8"
    )
    assert cordons["k1"] == Cordon("k1", "ann", "new cables")
    with pytest.raises(RunError, match="cordoned by ann"):
        asyncio.run(nodes.release("k1", "unbroken"))
    assert asyncio.run(nodes.release("k1", "ann")) and not asyncio.run(nodes.release("k1", "ann"))
    site.set_unschedulable("k0", True)
    assert asyncio.run(nodes.list())[0]["k0"].states == {"ready", "cordoned"}
    site.set_unschedulable("k0", False)


def test_a_watch_that_has_lost_its_place_misses_nothing(site: KubernetesSite) -> None:
    """The API forgets versions, and ends watches: pods are listed again."""

    async def work() -> None:
        cluster = make_cluster("kubernetes", "run-1", options(site))
        try:
            (node,) = (await cluster.acquire(Request(1))).nodes
            for _ in range(3):
                site.do(site.api.forget_history)
                site.do(lambda: site.all.say_ready(site.all.nodes[node]))
            site.do(site.api.break_watches)
            site.do(site.api.forget_history)
            fresh = await cluster.acquire(Request(1, replaces=(node,)))
            assert fresh.nodes != (node,)
            await cluster.give_back(fresh.nodes)
        finally:
            await cluster.close()

    asyncio.run(work())
    assert all("deletionTimestamp" in p["metadata"] for p in site.pods())
