"""The verbs on Kubernetes Engine, on a cluster that is a stand-in: what is run, and what is said of what is wrong."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.goldens import cases, compare
from tests.launching.driving import REPOSITORY
from tests.launching.kubernetes_stand_in import FLAGS, Kubernetes
from tpu_grpo.cli.launch import main

WRONG = Path(__file__).with_name("pods.txt")
MISTAKES = Path(__file__).with_name("gke_mistakes.txt")
CONFIG = str(REPOSITORY / "configs/gsm8k_cpu_check.yaml")
RUN = ("--bucket", "b", CONFIG, "run.dir=/mnt/run/a", "checkpoint.every=5")
type Gke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gke(kubernetes: Kubernetes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gke:
    """Calls a verb; returns its code and what it prints."""
    monkeypatch.chdir(REPOSITORY)

    def called(verb: str, *words: str) -> tuple[int, str, str]:
        code = main([verb, "--on", "gke", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


@pytest.fixture
def running(kubernetes: Kubernetes, gke: Gke) -> Kubernetes:
    """A run on the four hosts of a v5e-16."""
    assert gke("run", *RUN)[0] == 0
    kubernetes.pods()
    return kubernetes


# --- what is run ------------------------------------------------------------------------------------------------------


def test_what_is_printed_is_what_is_run(kubernetes: Kubernetes, gke: Gke) -> None:
    words = ("--context", "c", "--namespace", "n n")
    _, _, err = gke("run", *words, *RUN)
    printed = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith("$ ")]
    assert printed == kubernetes.calls()
    assert not Path(printed[-1][-1].partition("=")[2]).exists()  # it had the secrets
    assert [call[:4] for call in printed] == [
        ["kubectl", verb, "--context=c", "--namespace=n n"] for verb in ("get", "delete", "apply")
    ]


def test_secrets_reach_the_cluster_unseen(kubernetes: Kubernetes, gke: Gke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    _, out, err = gke("run", *RUN)
    assert "passing on HF_TOKEN, TPU_GRPO_SECRET, by the secret grpo-secrets" in err
    assert kubernetes.load()["objects"]["secret/grpo-secrets"]["stringData"]["HF_TOKEN"] == "hf_s3cret"
    assert "hf_s3cret" not in out + err + str(kubernetes.calls()) + str(kubernetes.jobset())


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "delete", "run"])
def test_a_dry_run_runs_nothing(verb: str, kubernetes: Kubernetes, gke: Gke) -> None:
    code, _, err = gke(verb, "--dry-run", *(RUN if verb == "run" else ()))
    assert (code, kubernetes.calls()) == (0, [])
    assert "$ kubectl " in err


def test_a_run_is_not_replaced_while_it_goes_on(running: Kubernetes, gke: Gke) -> None:
    code, _, err = gke("run", *RUN)
    assert code == 1
    assert "LaunchError: grpo must be free for a run, got one running; `stop` it, or wait for its end" in err
    running.fail("ReachedMaxRestarts", "jobset failed due to reaching max number of restarts", 10)
    assert gke("run", *RUN)[0] == 0
    assert "status" not in running.jobset()


def test_logs_of_four_hosts_are_told_apart(running: Kubernetes, gke: Gke) -> None:
    (running.root / "logs").mkdir()
    for host in range(4):
        (running.root / f"logs/grpo-slice-0-{host}-r0").write_text("".join(f"line {n} of {host}\n" for n in range(30)))
    running.say((1,), waiting("ContainerCreating", ""))
    code, out, _ = gke("logs", "--lines", "1")
    assert (code, out.splitlines()) == (0, [f"[{host}] line 29 of {host}" for host in (0, 2, 3)])
    running.pods()
    code, out, _ = gke("logs", "--lines", "2")
    assert (code, out.splitlines()) == (0, [f"[{host}] line {n} of {host}" for host in range(4) for n in (28, 29)])
    code, out, _ = gke("logs", "--follow", "--lines", "30")
    lines = out.splitlines()
    assert lines != sorted(lines), "nothing was interleaved"
    for host in range(4):
        assert [line for line in lines if line.startswith(f"[{host}]")] == [
            f"[{host}] line {n} of {host}" for n in range(30)
        ]


def test_hosts_are_numbered_slice_by_slice(kubernetes: Kubernetes, gke: Gke) -> None:
    assert gke("run", "--slices", "2", *RUN, "meshes.slices=2")[0] == 0
    kubernetes.pods()
    lines = gke("status")[1].splitlines()
    assert lines[0] == "grpo, 8 hosts: running, 0 of 10 restarts"
    assert lines[6] == "[5] grpo-slice-1-1-r0: Running  (node-1-1)"


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_stop_suspends_first_and_tells_the_code_of_every_host(running: Kubernetes, gke: Gke) -> None:
    running.save({**running.load(), "ends": 4})
    before = len(running.calls())
    code, out, _ = gke("stop")
    assert (code, out.splitlines()) == (0, [f"[{host}] ended, exit code 4" for host in range(4)])
    verbs = [call[1] for call in running.calls()[before:]]
    assert verbs.index("patch") < verbs.index("wait")
    assert running.jobset()["spec"]["suspend"] is True
    assert gke("status")[1].startswith("grpo, 4 hosts: stopped, ")
    assert gke("run", *RUN)[0] == 0  # goes on
    assert "suspend" not in running.jobset()["spec"]


def test_a_queued_run_is_taken_from_its_queue_or_kueue_would_resume_it(kubernetes: Kubernetes, gke: Gke) -> None:
    assert gke("run", "--queue", "q", *RUN)[0] == 0
    state = kubernetes.load()
    state["objects"]["jobset/grpo"]["spec"]["suspend"] = True  # as Kueue does at first
    kubernetes.save({**state, "ends": 4})
    assert gke("status")[1].startswith("grpo, 4 hosts: waiting in its queue, ")
    assert "got one waiting in its queue" in gke("run", *RUN)[2]
    kubernetes.pods()
    assert gke("stop")[0] == 0
    patched = [call[2:4] for call in kubernetes.calls() if call[1] == "patch"]
    assert patched == [["workload", "jobset-grpo-1"], ["jobset", "grpo"]]
    assert kubernetes.load()["objects"]["workload/jobset-grpo-1"] == {"spec": {"active": False}}


@pytest.mark.full
def test_a_host_that_does_not_end_and_a_jobset_that_is_not_there(running: Kubernetes, gke: Gke) -> None:
    code, _, err = gke("stop", "--grace", "1")
    assert code == 1
    assert "failed (time, exit code 1)" in err
    assert err.splitlines()[-1] == "some pods have not ended yet; `status` shows them"
    assert running.jobset()["spec"]["suspend"] is True
    assert gke("delete")[0] == 0
    assert running.load()["objects"] == {}
    assert gke("status")[1] == "there is no JobSet grpo\n"
    code, _, err = gke("stop")
    assert (code, err.splitlines()[-1]) == (1, "check --name, --namespace and --context")


# --- what goes wrong --------------------------------------------------------------------------------------------------

DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
PENDING = {"phase": "Pending", "containerStatuses": []}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient google.com/tpu.",
}


def ended(code: int, reason: str = "Error") -> dict:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": "Failed", "containerStatuses": [{"name": "tpu-grpo", "state": state}]}


def waiting(reason: str, message: str) -> dict:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "tpu-grpo", "state": state}]}


def event(host: int, reason: str, message: str) -> dict:
    return {"involvedObject": {"name": f"grpo-slice-0-{host}-r0"}, "reason": reason, "message": message}


def quota(cluster: Kubernetes) -> None:
    cluster.say((0, 1, 2, 3), {**PENDING, "conditions": [UNSCHEDULABLE]}, node=False)
    message = "Node scale up in zones us-west4-a associated with this pod failed: GCE quota exceeded."
    cluster.save({**cluster.load(), "events": [event(host, "FailedScaleUp", message) for host in range(4)]})


def nodes_came(cluster: Kubernetes) -> None:
    """Events of an hour ago are still there."""
    said = "0/3 nodes are available: 3 Insufficient google.com/tpu."
    cluster.save({**cluster.load(), "events": [event(0, "FailedScheduling", said)]})


def bucket(cluster: Kubernetes) -> None:
    cluster.say((0,), waiting("ContainerCreating", ""))
    said = (
        'MountVolume.SetUp failed for volume "bucket": rpc error: code = PermissionDenied desc = storage.objects.list'
    )
    cluster.save({**cluster.load(), "events": [event(0, "FailedMount", said)]})


def slice_preempted(cluster: Kubernetes) -> None:
    gone = {
        **DISRUPTED,
        "reason": "TerminationByKubelet",
        "message": "Pod was terminated in response to imminent node shutdown.",
    }
    cluster.say((0, 1, 2, 3), {**ended(137), "conditions": [gone]})
    cluster.status({"restarts": 1})


def evicted(cluster: Kubernetes) -> None:
    said = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
    cluster.say((2,), {**ended(137), **said, "conditions": [{**DISRUPTED, "reason": "EvictionByEvictionAPI"}]})
    cluster.say((0, 1, 3), ended(3))


def displaced(cluster: Kubernetes) -> None:
    cluster.say(
        (0, 1), {**ended(4), "conditions": [{**DISRUPTED, "reason": "PreemptionByScheduler", "message": "by x"}]}
    )


def exhausted(cluster: Kubernetes) -> None:
    cluster.say((0, 1, 2, 3), ended(3))
    cluster.fail("ReachedMaxRestarts", "jobset failed due to reaching max number of restarts", 10)


def final(cluster: Kubernetes) -> None:
    cluster.say((1,), ended(2))
    cluster.fail("FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action", 0)


SCENES: dict[str, Callable[[Kubernetes], None]] = {
    "all is well": lambda _: None,
    "pods pending for quota": quota,
    "nodes came": nodes_came,
    "no node pool": lambda cluster: cluster.say((0, 1), {**PENDING, "conditions": [UNSCHEDULABLE]}, node=False),
    "no image": lambda cluster: cluster.say((0, 3), waiting("ImagePullBackOff", 'Back-off pulling image "i:1"')),
    "no bucket": bucket,
    "out of memory": lambda cluster: cluster.say((2,), ended(137, "OOMKilled")),
    "one pod evicted": evicted,
    "a slice preempted": slice_preempted,
    "displaced": displaced,
    "restarts exhausted": exhausted,
    "a final error": final,
}


@pytest.mark.parametrize(("scene", "told"), cases(WRONG))
def test_what_is_wrong_is_told_in_a_line_with_a_remedy(scene: str, told: str, running: Kubernetes, gke: Gke) -> None:
    SCENES[scene](running)
    code, out, _ = gke("status")
    assert code == 0
    compare(WRONG, scene, told, out.rstrip())


def test_pods_that_were_replaced_are_not_shown(running: Kubernetes, gke: Gke) -> None:
    slice_preempted(running)
    old = running.load()["pods"]
    running.pods(restart=1)
    running.save({**running.load(), "pods": [*running.load()["pods"], *old]})
    lines = gke("status")[1].splitlines()
    assert lines[:2] == ["grpo, 4 hosts: running, 1 of 10 restarts", "[0] grpo-slice-0-0-r1: Running  (node-0-0)"]
    assert len(lines) == 5


ERRORS = [
    ('no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"', "JobSet", "install JobSet in the cluster"),
    ('Error from server (Forbidden): jobsets is forbidden: User "a"', "permission", "Kubernetes Engine Developer"),
    ("The connection to the server 10.0.0.1 was refused", "cluster", "log in to the cluster"),
    ('error: context "c" does not exist', "cluster", "log in to the cluster"),
    ('admission webhook "vjobset.kb.io" denied the request: too long', "invalid", "for the reason above"),
    (".spec.failurePolicy.maxRestart: field not declared in schema", "invalid", "for the reason above"),
    ("error: something new", "unknown", "look at what kubectl printed above"),
]


@pytest.mark.parametrize(("said", "kind", "remedy"), ERRORS, ids=[said for said, _, _ in ERRORS])
def test_errors_of_kubectl_are_shown_with_what_to_do(
    said: str, kind: str, remedy: str, kubernetes: Kubernetes, gke: Gke
) -> None:
    kubernetes.save({**kubernetes.load(), "faults": {"apply": said}})
    code, _, err = gke("run", *RUN)
    assert code == 1
    assert f"failed ({kind}, exit code 1)" in err
    assert said in err
    assert remedy in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(("words", "told"), cases(MISTAKES))
def test_mistakes_are_refused_or_warned_of(words: str, told: str, kubernetes: Kubernetes, gke: Gke) -> None:
    code, _, err = gke(*shlex.split(words))
    lines = [line for line in err.rstrip().splitlines() if not line.startswith(("$ ", "needs", "passing", "started"))]
    compare(MISTAKES, words, told, "\n".join(lines))
    assert code == (0 if told.startswith("careful: ") else 2)
    assert code == 0 or kubernetes.calls() == []


def test_without_kubectl(gke: Gke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = gke("status")
    assert code == 2
    assert "kubectl must be on the PATH, got no such program" in err


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("verb", FLAGS)
def test_the_real_kubectl_has_the_flags(verb: str) -> None:
    """Of which the stand-in knows only those that are used."""
    told = "".join(
        subprocess.run(["kubectl", *words], capture_output=True, text=True).stdout
        for words in ([verb, "--help"], ["options"])
    )
    missing = [flag for flag in FLAGS[verb] if not re.search(rf"--{flag}[=\s]", told)]
    assert missing == []
