"""The pod of a node: by Kubernetes' own schema, and what a site's template adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unbroken.cluster.kubernetes.api import CONFIG_MAPS, NEEDED, PATCH_NODES, SEE_NODES
from unbroken.cluster.kubernetes.manifest import RUN, make_pod, name_pod, read_template
from unbroken.cluster.kubernetes.options import KubernetesOptions
from unbroken.cluster.options import make_options
from unbroken.errors import UsageError

yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install -r requirements/all.txt")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install -r requirements/all.txt"
)
DOCS = Path(__file__).resolve().parents[3] / "docs"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
TEMPLATE = """
metadata: {labels: {team: vision}, annotations: {note: x}}
spec:
  nodeSelector: {pool: gpu}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  imagePullSecrets: [{name: registry}]
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions: [{key: zone, operator: In, values: [a]}]
          - matchExpressions: [{key: zone, operator: In, values: [b]}]
  volumes: [{name: data, emptyDir: {}}]
  containers:
    - name: main
      image: other
      env: [{name: NCCL_DEBUG, value: WARN}]
      resources: {limits: {rdma/hca: "1"}}
      securityContext: {runAsUser: 1000}
      volumeMounts: [{name: data, mountPath: /data}]
"""


def make(options: dict[str, str], **given: Any) -> dict[str, Any]:
    chosen = make_options(KubernetesOptions, {"image": "reg/train:1", **options}, where="here")
    pod = make_pod(chosen, "Run_1", name_pod("Run_1", 3, "abcd"), 3, **given)
    for version in ("1.28", "1.33"):
        kubernetes_validate.validate(pod, version, strict=True)
    return pod


def find(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def test_agent_and_keeper_have_a_container_of_their_own_and_share_memory_alone_with_the_ranks() -> None:
    pod = make(
        {"gpus": "8", "cpus": "64", "memory": "512GiB", "keeper_memory": "256GiB", "shm": "64GiB", "mounts": "claim:/data,/scratch:/tmp/s"}
    )  # fmt: skip
    agent, ranks = find(pod, "agent"), find(pod, "ranks")
    assert ranks["resources"]["limits"] == {"memory": str(512 << 30), "nvidia.com/gpu": "8"}
    assert ranks["resources"]["requests"]["cpu"] == "64"
    assert agent["resources"]["limits"] == {"memory": str(256 << 30)}, "no GPU, and not unlimited"
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(64 << 30)}}
    assert shm in pod["spec"]["volumes"] and pod["spec"]["shareProcessNamespace"]
    for container in (agent, ranks):
        assert {m["mountPath"] for m in container["volumeMounts"]} == {"/dev/shm", "/data", "/tmp/s"}
    assert pod["spec"]["volumes"][1]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert pod["spec"]["volumes"][2]["hostPath"] == {"path": "/scratch"}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    leave = agent["lifecycle"]["preStop"]["exec"]["command"]
    assert int(leave[-1]) < 120, "it ends before its time of grace does"
    assert pod["spec"]["automountServiceAccountToken"] is False, "the user's script has no token"
    assert pod["metadata"]["name"].islower() and pod["metadata"]["labels"][RUN] == "Run_1"


def test_nothing_secret_is_in_a_pod() -> None:
    text = json.dumps(make({}))
    assert (
        "token" not in text.lower().replace("automountserviceaccounttoken", "")
        and "secret" not in text.lower()
    )


def test_a_template_keeps_what_it_says_beside_what_a_run_needs(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    template = read_template(tmp_path / "pod.yaml")
    pod = make({"gpus": "1"}, template=template, exclude=["bad-2", "bad-1"])
    spec = pod["spec"]
    assert pod["metadata"]["labels"]["team"] == "vision" and spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["imagePullSecrets"] and spec["tolerations"]
    terms = spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert len(terms) == 2
    for term in terms:  # alternatives: each keeps out what is to be kept out
        assert [f["values"] for f in term["matchFields"]] == [["bad-1"], ["bad-2"]] and term[
            "matchExpressions"
        ]
    assert spec["affinity"]["podAntiAffinity"][REQUIRED][0]["labelSelector"]["matchLabels"] == {RUN: "Run_1"}
    agent, ranks = find(pod, "agent"), find(pod, "ranks")
    for container in (agent, ranks):
        assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"] and container[
            "image"
        ] == "reg/train:1"
        assert container["securityContext"] == {"runAsUser": 1000}
    assert ranks["resources"]["limits"] == {"rdma/hca": "1", "nvidia.com/gpu": "1"}
    assert "rdma/hca" not in json.dumps(agent["resources"])
    assert template == read_template(tmp_path / "pod.yaml"), "it is the same for the next pod"


def test_a_pod_for_one_node_goes_nowhere_else() -> None:
    pod = make({}, node="k1")
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["k1"]}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "no YAML"),
        ("- 1", "neither a Pod"),
        ("kind: Job\nspec: {template: {}}", "neither a Pod"),
        ("spec: {containers: [{name: a}, {name: b}]}", "more than one container"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_template_is_told(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_template(tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("image", "a b", "no image"),
        ("gpus", "-1", "cannot have -1 GPUs"),
        ("gpu_resource", "gpu", "no name of a resource"),
        ("cpus", "many", "no number of processors"),
        ("mounts", "claim", "a mount is written"),
        ("cordon", "drain", "auto, taint, own"),
        ("grace", "1s", "between 10s and 1d"),
        ("idle", "1s", "10s or more"),
    ],
)
def test_bad_options_are_told(key: str, value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_options(KubernetesOptions, {"image": "i", key: value}, where="here")


def test_the_manifests_of_the_docs_are_valid_and_give_the_rights_that_are_asked_for() -> None:
    documents = list(yaml.safe_load_all((DOCS / "kubernetes-rbac.yaml").read_text()))
    documents += yaml.safe_load_all((DOCS / "kubernetes-run.yaml").read_text())
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
    rules = {d["kind"]: d["rules"] for d in documents if "rules" in d}

    def given(kind: str) -> set[str]:
        return {f"{v} {r}" for rule in rules[kind] for r in rule["resources"] for v in rule["verbs"]}

    assert given("Role") == {str(p) for p in (*NEEDED, *CONFIG_MAPS)}
    assert given("ClusterRole") == {str(p) for p in (*SEE_NODES, *PATCH_NODES)}
