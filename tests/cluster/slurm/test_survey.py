"""What nodes say of themselves before anything starts there, and what their silence means: an image without our package above all."""

from __future__ import annotations

import json

import pytest

from unbroken.cluster.slurm.survey import NodeSurvey, find_trouble, read_surveys
from unbroken.version import __version__


@pytest.mark.parametrize(
    ("image", "said", "says", "do"),
    [
        ("nvcr.io/nvidia/pytorch:25.01", "/usr/bin/python3: No module named unbroken",
         "the image nvcr.io/nvidia/pytorch:25.01 does not have unbroken", "mounts=/folder,python=/folder/bin/python"),
        ("", "python: Error while finding module specification for 'unbroken.cluster.slurm.node' (No module named 'unbroken')",
         "the interpreter there does not have unbroken", "python=PATH"),
        ("img.sqsh", "srun: unrecognized option '--container-image=img.sqsh'", "Pyxis", "runtime=apptainer"),
    ],
)  # fmt: skip
def test_a_silent_node_is_explained_by_what_was_printed(image: str, said: str, says: str, do: str) -> None:
    trouble = find_trouble(["n1", "n2"], {}, gpus=None, said=said, image=image)
    assert trouble is not None and says in trouble.message and "n1" in str(trouble.where)
    assert do in (trouble.hint or "")


def test_an_image_without_torch_or_with_another_version_is_told() -> None:
    def find(**fields: object) -> str:
        survey = NodeSurvey("n1", **{"version": __version__, "gpus": 8, "python": "python3", **fields})  # type: ignore[arg-type]
        trouble = find_trouble(["n1"], {"n1": survey}, gpus=None, said="", image="img")
        return str(trouble or "")

    assert find() == ""
    assert "torch cannot be imported there" in find(missing="torch")
    assert "unbroken 0.0.1 is installed there" in find(version="0.0.1")


def test_what_images_and_set_up_lines_print_beside_an_answer_is_passed_over() -> None:
    answer = {
        "kind": "survey",
        "node": "n1",
        "version": "1",
        "gpus": 8,
        "python": "p",
        "later": "unknown to us",
    }
    text = f"loading module cuda\n{{not json\n[1]\n{json.dumps(answer)}\n"
    assert read_surveys(text) == {"n1": NodeSurvey("n1", "1", 8, "p")}
