"""The JobSet (Kubernetes) that runs a job on TPU slices of Google Kubernetes Engine (GKE), as data.

A slice is an indexed Job, whose pods are the slice's hosts: the pod grpo-slice-1-0-p2m7c is host 0 of the second slice,
at grpo-slice-1-0.grpo. A pod never restarts alone (restartPolicy Never, backoffLimit 0): its Job fails, for the reason
PodFailurePolicy if the run's error is final (exit codes 1 and 2), and for another reason if it is not: exit codes 3 and
4, kills, lost nodes. The JobSet then fails, or creates all pods anew.
"""

from typing import Any

from tpu_grpo.launching.babysit import FINAL_CODES
from tpu_grpo.launching.jobs import RUN_SCRIPT, Job, chip_environment
from tpu_grpo.launching.launch_options import BUCKET, Options
from tpu_grpo.launching.tpus import Slice
from tpu_grpo.records.errors import ConfigError

type Manifest = dict[str, Any]

CONTAINER = "tpu-grpo"
MOUNT = "/mnt/run"
"""Where pods have the bucket."""
CONFIG_DIRECTORY = "/etc/tpu_grpo"
BUCKET_OPTIONS = (
    "implicit-dirs,uid=1000,gid=1000,"  # the image's user
    # Hosts wait for each other's files, and watch the lock of run.dir for 60 s: they must see those of now.
    "metadata-cache:ttl-secs:5,metadata-cache:negative-ttl-secs:0"
)
LONGEST_NAME = 63
SLICE, HOST = "jobset.sigs.k8s.io/job-index", "batch.kubernetes.io/job-completion-index"
"""Labels and annotations of a pod: the number of its slice, and of its host in the slice."""
QUEUE = "kueue.x-k8s.io/queue-name"
STOPPED = "tpu-grpo/stopped"
"""The annotation of a JobSet that `stop` has suspended."""


def manifests(job: Job, options: Options) -> tuple[Manifest, Manifest, Manifest]:
    """Return the JobSet, and what it refers to: a ConfigMap with the config, and a Secret with the variables that must
    not be printed.

    Raises:
        ConfigError: an option is missing or impossible on GKE, or a pod's name would be too long for Kubernetes.
    """
    kind, name = _checked(job, options), options.name
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    final = {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_CODES)}
    rules = [{"action": "Count", "onPodConditions": lost}, {"action": "FailJob", "onExitCodes": final}]
    one_slice = {
        "completionMode": "Indexed",
        "completions": kind.hosts,
        "parallelism": kind.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": _pod(job, options, kind),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": options.restarts,
            "restartStrategy": "BlockingRecreate",  # the old pods are gone before new ones take run.dir and the chips
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": "slice", "replicas": options.slices, "template": {"spec": one_slice}}],
    }
    queue = {QUEUE: options.queue, "kueue.x-k8s.io/priority-class": options.queue and options.priority}
    each_on_a_node_pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    metadata = _given(name=name, labels=_given(**queue), annotations=each_on_a_node_pool if kind.hosts > 1 else {})
    config = {"metadata": {"name": f"{name}-config"}, "data": {"config.yaml": job.content.decode()}}
    secret = {"metadata": {"name": f"{name}-secrets"}, "stringData": dict(job.secrets)}
    return (
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec},
        {"apiVersion": "v1", "kind": "ConfigMap", **config},
        {"apiVersion": "v1", "kind": "Secret", **secret},
    )


def _checked(job: Job, options: Options) -> Slice:
    kind, name = options.slice, options.name
    if kind is None:
        raise ConfigError("--type must say which slices the run needs, got none; for example --type v5e-16")
    if not options.image:
        raise ConfigError("--image must name what pods run, got none; docs/pod_guide.md says how to build it")
    if job.script != RUN_SCRIPT:
        raise ConfigError(f"--script must be {RUN_SCRIPT} on GKE, where pods run the image's, got {job.script}")
    if options.slices > 1 and kind.hosts == 1:
        raise ConfigError(
            f"--slices must be 1 for {kind.name}: GKE joins only slices of several hosts, got {options.slices}; take "
            "one larger slice"
        )
    longest = f"{name}-slice-{options.slices - 1}-{kind.hosts - 1}-abcde"
    if (excess := len(longest) - LONGEST_NAME) > 0:
        raise ConfigError(
            f"--name must leave pods names of {LONGEST_NAME} characters, got {name}, {excess} too long; shorten it"
        )
    own = {"TPU_PROCESS_ADDRESSES", *(variable["name"] for variable in meeting_variables(name, kind, options.slices))}
    if given := sorted(own & {*job.environment, *job.secrets}):  # TPU_PROCESS_ADDRESSES beats TPU_WORKER_HOSTNAMES
        raise ConfigError(f"--env must leave {given[0]} to the launcher: hosts find each other by it; leave it out")
    return kind


def _pod(job: Job, options: Options, kind: Slice) -> Manifest:
    spot = ["cloud.google.com/gke-spot"] if options.spot else []
    volumes: dict[str, Manifest] = {
        CONFIG_DIRECTORY: {"name": "config", "configMap": {"name": f"{options.name}-config"}},
        "/dev/shm": {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    }
    if options.bucket:
        attributes = {"bucketName": options.bucket.removeprefix(BUCKET), "mountOptions": BUCKET_OPTIONS}
        csi = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        volumes[MOUNT] = {"name": "bucket", "csi": csi}
    shown = {**chip_environment(kind, job.cache, job.libtpu_args), **job.environment}
    container = _given(
        name=CONTAINER,
        image=options.image,
        args=["run", f"{CONFIG_DIRECTORY}/config.yaml", *map(_literal, job.words)],
        env=[
            *meeting_variables(options.name, kind, options.slices),
            *({"name": name, "value": _literal(value)} for name, value in shown.items()),
        ],
        envFrom=[{"secretRef": {"name": f"{options.name}-secrets"}}],
        resources={"limits": {"google.com/tpu": kind.chips // kind.hosts}},
        volumeMounts=[{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()],
        securityContext={"privileged": True, "runAsUser": 0} if options.privileged else {},
    )
    spec = _given(
        restartPolicy="Never",
        terminationGracePeriodSeconds=options.grace,
        nodeSelector={
            "cloud.google.com/gke-tpu-accelerator": kind.generation.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": kind.topology(),
            **dict.fromkeys(spot, "true"),
        },
        tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in ("google.com/tpu", *spot)],
        containers=[container],
        volumes=[*volumes.values()],
        serviceAccountName=options.service_account,
        priorityClassName=None if options.queue else options.priority,
    )
    return _given(metadata={"annotations": {"gke-gcsfuse/volumes": "true"}} if options.bucket else {}, spec=spec)


def _given(**values: Any) -> Manifest:
    """Return the fields that have a value."""
    return {name: value for name, value in values.items() if value not in (None, "", {})}


def _literal(text: str) -> str:
    """Return a text for which Kubernetes replaces no variables in it."""
    return text.replace("$(", "$$(")


def meeting_variables(name: str, kind: Slice, slices: int) -> list[Manifest]:
    """Return the variables by which pods find each other; jax and libtpu read them. In every pod, Kubernetes replaces
    $(TPU_GRPO_SLICE). jax 0.10.2 asks the metadata server six times for each MEGASCALE variable that is absent, so one
    slice has them, empty."""
    given = {"TPU_GRPO_SLICE": SLICE, "TPU_WORKER_ID": HOST}
    hosts = [f"{name}-slice-$(TPU_GRPO_SLICE)-{host}.{name}" for host in range(kind.hosts)]
    several = {
        "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-slice-0-0.{name}",
        "MEGASCALE_NUM_SLICES": str(slices),
        "MEGASCALE_SLICE_ID": "$(TPU_GRPO_SLICE)",
    }
    fixed = {
        "TPU_WORKER_HOSTNAMES": ",".join(hosts) if kind.hosts > 1 else "localhost",
        **(several if slices > 1 else dict.fromkeys(several, "")),
    }
    paths = {variable: {"fieldPath": f"metadata.annotations['{label}']"} for variable, label in given.items()}
    references = [{"name": variable, "valueFrom": {"fieldRef": path}} for variable, path in paths.items()]
    return [*references, *({"name": key, "value": value} for key, value in fixed.items())]
