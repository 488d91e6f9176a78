"""The JobSet of a job, as a whole, and against the published schema; how its pods find each other.

The schema is that of the package kubeflow-trainer-api (Apache License 2.0): models that Kubeflow generates from the
OpenAPI descriptions of JobSet (v1alpha2) and Kubernetes.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jax._src.clusters import cloud_tpu_cluster
from pydantic import BaseModel, ValidationError

from tests.goldens import cases, compare, rows
from tests.launching.driving import REPOSITORY
from tests.launching.kubernetes_stand_in import expanded
from tpu_grpo.cli.launch import main
from tpu_grpo.hosts.coordination_service import Service
from tpu_grpo.hosts.joining import start
from tpu_grpo.launching.jobset import BUCKET_OPTIONS, meeting_variables
from tpu_grpo.launching.tpus import GENERATIONS, Slice, parse_slice

MANIFESTS = Path(__file__).with_name("manifests.txt")
LISTED = ("action", "completion_mode", "effect", "medium", "operator", "restart_policy")
"""Fields whose values the published descriptions name."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_TYPE", "TPU_SLICES", "TPU_IMAGE", "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_NAME", "grpo")
    monkeypatch.setenv("TPU_GRPO_SECRET", "s3cret" * 8)
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize(("words", "told"), cases(MANIFESTS))
def test_a_dry_run_prints_the_manifest(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--on", "gke", *shlex.split(words), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "s3cret" not in out + err
    manifest, config = yaml.safe_load_all(out)
    assert config["data"]["config.yaml"] == (REPOSITORY / re.search(r"configs/\S+", words)[0]).read_text()  # pyrefly: ignore[unsupported-operation]
    compare(MANIFESTS, words, told, out.partition("---\n")[0].rstrip("\n"))
    assert {item["kind"] for item in (manifest, config)} == {"JobSet", "ConfigMap"}


# --- the schema that JobSet and Kubernetes publish --------------------------------------------------------------------


def unfit(manifest: Any) -> str:
    """Say what of a JobSet the published schema does not have, drops, or does not list; "" if nothing."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # takes a second and a half

    try:
        read = JobsetV1alpha2JobSet.from_dict(deepcopy(manifest))
    except (ValidationError, AttributeError, TypeError) as error:
        return str(error)
    assert read is not None
    return "a field is unknown or missing" if read.to_dict() != manifest else ", ".join(unlisted(read))


def unlisted(model: BaseModel) -> Iterator[str]:
    """Yield the values that the description of their field does not name, where it names all."""
    for name, value in model:
        said = type(model).model_fields[name].description or ""
        if name in LISTED and value is not None and not re.search(rf"\b{value}\b", said):
            yield f"{name} {value}"
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from unlisted(each)


@pytest.mark.full
@pytest.mark.parametrize(("words", "told"), rows(MANIFESTS), ids=[words for words, _ in rows(MANIFESTS)])
def test_manifests_have_what_the_api_has(words: str, told: str) -> None:
    assert unfit(yaml.safe_load(told)) == ""


def first(spec: Any, *path: str) -> Any:
    """Return the part at the path, by the first element of every list."""
    for key in path:
        spec = spec[key][0] if isinstance(spec[key], list) else spec[key]
    return spec


JOB = ("replicatedJobs", "template", "spec")
POD = (*JOB, "template", "spec")
CHANGES: dict[str, Callable[[Any], object]] = {
    "a field of the JobSet that is unknown": lambda spec: spec.update(replicas=2),
    "a number as text": lambda spec: first(spec, "replicatedJobs").update(replicas="2"),
    "a misspelt field": lambda spec: spec["failurePolicy"].update(maxRestart=1),
    "an unknown action of the JobSet": lambda spec: first(spec, "failurePolicy", "rules").update(action="Fail"),
    "a Job without a pod": lambda spec: first(spec, *JOB).pop("template"),
    "an unknown action of the Job": lambda spec: first(spec, *JOB, "podFailurePolicy", "rules").update(action="Fail"),
    "an unknown mode": lambda spec: first(spec, *JOB).update(completionMode="All"),
    "an unknown policy": lambda spec: first(spec, *POD).update(restartPolicy="Sometimes"),
    "an unknown effect": lambda spec: first(spec, *POD, "tolerations").update(effect="NoPod"),
    "a label that is no text": lambda spec: first(spec, *POD)["nodeSelector"].update(spot=True),
    "a variable without a name": lambda spec: first(spec, *POD, "containers")["env"].append({}),
    "a misspelt field of a container": lambda spec: first(spec, *POD, "containers").update(envs=[]),
    "a container without a name": lambda spec: first(spec, *POD, "containers").pop("name"),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_other_manifests_are_refused(change: str) -> None:
    manifest = yaml.safe_load(rows(MANIFESTS)[0][1])
    assert unfit(manifest) == ""
    CHANGES[change](manifest["spec"])
    assert unfit(manifest) != ""


# --- how pods find each other -----------------------------------------------------------------------------------------


def in_pod(monkeypatch: pytest.MonkeyPatch, name: str, kind: Slice, slices: int, at: int, host: int) -> None:
    """Set the variables of a pod; there is no metadata server."""
    annotations = {"jobset.sigs.k8s.io/job-index": str(at), "batch.kubernetes.io/job-completion-index": str(host)}
    found: dict[str, str] = {}
    for variable in meeting_variables(name, kind, slices):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "['']")
        value = variable.get("value", annotations.get(path.split("'")[1], ""))
        found[variable["name"]] = expanded(value, found)
        monkeypatch.setenv(variable["name"], found[variable["name"]])
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: pytest.fail(f"{key} is asked for"))
    monkeypatch.setattr("socket.gethostbyname", lambda host: host)


@pytest.mark.parametrize(
    ("name", "slices", "at", "host", "met"),
    [
        ("v5e-1", 1, 0, 0, None),
        ("v7x-8", 1, 0, 0, None),
        ("v5e-16", 1, 0, 3, ("grpo-slice-0-0.grpo:8482", 4, 3)),
        ("v5e-16", 2, 0, 0, ("grpo-slice-0-0.grpo:8482", 8, 0)),
        ("v5e-16", 2, 1, 2, ("grpo-slice-0-0.grpo:8482", 8, 6)),
        ("v7x-32", 3, 2, 3, ("grpo-slice-0-0.grpo:8482", 12, 11)),
    ],
)
def test_pods_find_each_other_without_a_metadata_server(
    name: str, slices: int, at: int, host: int, met: tuple | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pod(monkeypatch, "grpo", parse_slice(name), slices, at, host)
    seen: list[tuple] = []
    connect = "tpu_grpo.hosts.coordination_service.connect"
    monkeypatch.setattr(connect, lambda *words: seen.append(words[:3]) or Service(None))
    monkeypatch.setattr("tpu_grpo.hosts.ending.this_process.index", 0)
    hosts = start(None, 1, 0, environment={"JAX_PLATFORMS": ""})
    assert seen == ([] if met is None else [met])
    assert (hosts.index, hosts.count) == ((0, 1) if met is None else (met[2], met[1]))


def test_what_is_absent_would_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why one slice has the variables of several, empty."""
    in_pod(monkeypatch, "grpo", parse_slice("v5e-16"), 1, 0, 3)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES")
    with pytest.raises(pytest.fail.Exception, match="tpu-env is asked for"):
        start(None, 1, 0, environment={"JAX_PLATFORMS": ""})


# --- the table of slices ----------------------------------------------------------------------------------------------


def test_every_slice_has_googles_machines_and_topology() -> None:
    """The file: Google Kubernetes Engine documentation, "Plan TPUs in GKE", and xpk 1.9, June 2026."""
    text = (Path(__file__).parent / "gke_slices.txt").read_text()
    found: dict[tuple[str, str, int], list[str]] = {}
    for generation in GENERATIONS:
        for kind in (Slice(generation, chips) for chips in generation.topologies):
            if generation.torus_dimensions == 2 or kind.chips >= 4:
                key = generation.gke_accelerator, kind.machine_type, kind.chips // kind.hosts
                found.setdefault(key, []).append(f"{kind.name} {kind.topology()} {kind.hosts}")
    lines = [
        f"| `{label}` | `{machine}` | {chips} | {', '.join(all_)} |" for (label, machine, chips), all_ in found.items()
    ]
    assert "\n".join(["| label | machine | chips a host | slice, topology, hosts |", *lines]) == text.rstrip("\n")


def test_the_image_is_pinned_and_not_root() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert images
    assert all(re.fullmatch(r"python:3\.12\.\d+-slim-\w+", image) for image in images)
    assert all("==" in line for line in lines if "pip install" in line)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000"]
    assert f"uid={lines[lines.index('USER 1000')].split()[1]}" in BUCKET_OPTIONS
    assert 'ENTRYPOINT ["tpu-grpo"]' in lines  # without a shell, which would keep SIGTERM to itself
