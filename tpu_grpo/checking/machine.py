"""Rows of `tpu-grpo check` about machines: packages, devices, files and clocks of hosts, memory, and a killed run.

Some rows must be checked before jax is imported. The run that is killed must be started by a process without devices.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from tpu_grpo.checking.findings import Finding
from tpu_grpo.hosts import Hosts
from tpu_grpo.hosts.joining import TPU_DEVICE_FILES
from tpu_grpo.launching.tpus import GENERATIONS, GIB, parse_slice
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, METRICS_FILE, saved_steps
from tpu_grpo.records.json_files import read_steps
from tpu_grpo.run.fingerprints import fingerprints

ACCELERATOR = ("TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE")
"""Environment variables that name the slice to which a machine belongs."""
CLOCK_SECONDS = 5.0
"""The most seconds by which clocks may differ. Google's access tokens and the order of logs depend on clocks."""
FREE_SHARE = 0.9
"""The share of a chip's memory that must be free."""
HOST_BYTES = 4 * GIB
"""The memory that a host must have free: a small run takes half of it."""
CONTINUED_STEPS = 6
"""The last step of the continued run, which was killed after its third step."""
PACKAGE = Path(__file__).parents[1]


# --- before jax is imported ------------------------------------------------------------------------------------------


def packages(_: Any) -> Finding:
    """Compare the installed packages with the requirements in pyproject.toml, or else in the installed package."""
    wrong, count = [], 0
    for requirement in map(Requirement, _requirements()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} must be {requirement.specifier}, got {version}")
    if wrong:
        return Finding("broken", "; ".join(wrong), "uv sync")
    return Finding("works", f"{count} packages in the versions that are asked for")


def _requirements() -> Sequence[str]:
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists():
        return tomllib.loads(project.read_text())["project"]["dependencies"]
    return importlib.metadata.requires("tpu-grpo") or []


def device_files(_: Any, devices: Path = Path("/dev")) -> Finding:
    """Look for the device files of TPUs, and for other processes that have these files open."""
    files = [file for pattern in TPU_DEVICE_FILES for file in sorted(devices.glob(pattern))]
    named = next((os.environ[name] for name in ACCELERATOR if os.environ.get(name)), None)
    if not files and named:
        remedy = "restart the machine; in a container, pass the devices on (--privileged)"
        return Finding("broken", f"no TPU in {devices}, though this is a machine of {named}", remedy)
    if not files:
        return Finding("works", "no TPU in this machine: what follows is of its CPU")
    if holders := list(_holders(files)):
        return Finding("broken", f"the TPU is taken by {'; '.join(holders)}", "end that process, or wait for its end")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        text = f"{len(files)} TPU devices, which JAX_PLATFORMS=cpu hides: what follows is of the CPU"
        return Finding("works but slow", text, "unset JAX_PLATFORMS")
    return Finding("works", f"{len(files)} TPU devices, which no other process has")


def _holders(files: Sequence[Path]) -> Iterator[str]:
    """Yield the other processes that have any of the files open, as far as this user may see them."""
    names = {str(file) for file in files}
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if names & {os.readlink(file) for file in (process / "fd").iterdir()}:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield f"process {process.name} ({words.strip()[:80]})"
        except OSError:  # the process has ended, or belongs to another user
            continue


# --- with jax --------------------------------------------------------------------------------------------------------


def meet(shared: Any) -> Finding:
    """Connect to the other hosts, and compare settings, versions, environment and the files that the run reads."""
    shared.hosts = hosts = shared.join()
    found = fingerprints(shared.config)
    unreadable = [f"{name} is {value}" for name, value in found.items() if value.startswith("not readable")]
    if unreadable:
        return Finding("broken", "; ".join(unreadable), "copy these files again, or correct their paths")
    hosts.agree_all(found)
    what = f"{hosts.count} hosts agree on" if hosts.count > 1 else "one host, which has"
    return Finding("works", f"{what} {len(found)} settings, versions and files")


def clocks(shared: Any) -> Finding:
    """Compare the clocks of the hosts and of the file system to which the check writes."""
    hosts: Hosts = shared.hosts
    hosts.barrier("clocks")
    mine = time.time()
    found = dict(zip((f"host {host}" for host in hosts.members), hosts.share("clocks", mine, float), strict=True))
    probe = shared.directory / f".clock_{hosts.index}"
    probe.write_text("")
    file = probe.stat().st_mtime - time.time() + mine
    probe.unlink()
    found[f"the file system of {shared.directory}"] = file
    gaps = {name: seconds - found["host 0"] for name, seconds in found.items()}
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    if abs(gaps[worst]) > CLOCK_SECONDS:
        text = f"the clock of {worst} is {gaps[worst]:+.0f} s off host 0's"
        return Finding("broken", text, "turn on NTP (timedatectl set-ntp true)", {"seconds": gaps[worst]})
    return Finding("works", f"clocks within {abs(gaps[worst]):.2f} s", figures={"seconds": gaps[worst]})


def devices(shared: Any) -> Finding:
    """Open the devices, and find out their generation."""
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        return _refused(str(error))
    kind, platform = found[0].device_kind, found[0].platform
    shared.generation = next((g for g in GENERATIONS if kind in g.device_kinds), None)
    text = f"{len(found)} devices of kind {kind} on {shared.hosts.count} hosts"
    if platform == "cpu":
        return Finding("works", text)
    if shared.generation is None:
        known = ", ".join(generation.name for generation in GENERATIONS)
        return Finding("works but slow", f"{text}, a generation that plans do not know", f"plan for one of {known}")
    named = next((os.environ[name] for name in ACCELERATOR if os.environ.get(name)), None)
    slices = shared.config.meshes.slices
    if named and parse_slice(named).devices * slices != len(found):
        remedy = "start the same command on all workers; unset TPU_VISIBLE_DEVICES; correct meshes.slices"
        return Finding("broken", f"{text}, though the slice is {named} and meshes.slices={slices}", remedy)
    return Finding("works", f"{text}: {shared.generation.name}")


def _refused(error: str) -> Finding:
    """Explain, from the text of jax's error, why jax found no devices."""
    low, text = error.lower(), " ".join(error.split())[:300]
    if any(word in low for word in ("already in use", "in use by", "device or resource busy")):
        return Finding(
            "broken", f"the TPU is taken by another process: {text}", "end that process (sudo lsof -w /dev/accel*)"
        )
    if any(word in low for word in ("version", "driver", "firmware")):
        runtimes = ", ".join(f"{generation.runtime} on {generation.name}" for generation in GENERATIONS)
        remedy = f"create the slice with the runtime for JAX: {runtimes}"
        return Finding("broken", f"the machine's runtime version does not fit libtpu: {text}", remedy)
    return Finding("broken", f"no device was found: {text}", "restart the machine; look at /tmp/tpu_logs")


def memory(shared: Any) -> Finding:
    """Find out how much memory of the devices and of the host is free."""
    import jax

    host = psutil.virtual_memory().available
    figures: dict[str, float] = {"host_free_bytes": host}
    if host < HOST_BYTES:
        text = f"{host / GIB:.1f} GiB of the host's memory are free, a run needs {HOST_BYTES / GIB:.0f}"
        return Finding("broken", text, "end other processes", figures)
    if shared.generation is None:
        return Finding("works", f"{host / GIB:.1f} GiB of the host's memory are free", figures=figures)
    stats: list[Any] = [device.memory_stats() for device in jax.local_devices()]
    free = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    expected = shared.generation.chip.memory_bytes
    figures |= {"free_bytes": free, "chip_bytes": expected}
    text = f"{free / GIB:.2f} of {expected / GIB:.2f} GiB of a chip are free, {host / GIB:.1f} GiB of the host"
    if free < FREE_SHARE * expected:
        return Finding("broken", text, "end the process that has the rest; restart the machine", figures)
    return Finding("works", text, figures=figures)


# --- a run that is killed --------------------------------------------------------------------------------------------


def killed_run(host: int, words: Sequence[str], directory: Path, wait_seconds: float) -> Finding:
    """Run a few steps with ``tpu-grpo run``, kill the process, and continue the run from its last checkpoint.

    Steps after this checkpoint are done again, and must sample the same tokens. If there are several hosts, each starts
    the same processes. Host 0 kills its process; the other hosts' processes then end by themselves.

    Args:
        host: the number of this host.
        words: the config file and the settings of the run.
        directory: the run's directory, which all hosts share.
        wait_seconds: how long one process may take.
    """
    first, log = host == 0, directory.with_name(f"{directory.name}_{host}.log")
    log.unlink(missing_ok=True)
    if first:
        shutil.rmtree(directory, ignore_errors=True)
    run = _start(words, directory, 1000, log)
    reached = _until(lambda: run.poll() is not None or (first and 3 in _digests(directory)), wait_seconds)
    run.kill()
    run.wait()
    before, saved = _digests(directory), max(saved_steps(directory / CHECKPOINTS_DIR), default=0)
    if not reached or (first and 3 not in before):
        return _failed("a run did not come to its third step", log)
    run = _start(words, directory, CONTINUED_STEPS, log)
    if not _until(lambda: run.poll() is not None, wait_seconds) or run.returncode:
        run.kill()
        return _failed(f"the killed run did not continue after step {saved}", log)
    after = _digests(directory)
    again = {step: tokens for step, tokens in before.items() if step <= CONTINUED_STEPS}
    if first and (wrong := [step for step, tokens in again.items() if after.get(step) != tokens]):
        text = f"step {wrong[0]} is not the same after the run was continued from step {saved}"
        return Finding("broken", text, f"paste this block and {log} into an issue")
    return Finding("works", f"a run was killed, and continued after step {saved} with the same tokens")


def _start(words: Sequence[str], directory: Path, steps: int, log: Path) -> "subprocess.Popen[Any]":
    """Start a run of ``steps`` steps that saves a checkpoint every second step; its output goes to ``log``."""
    settings = {"run.dir": directory, "run.max_steps": steps, "checkpoint.every": 2, "checkpoint.resume": "auto"}
    settings |= {"checkpoint.allow_changes": "[run]", "run.epochs": "null", "evaluation.prompts": 1}
    settings |= {"export.every": "null", "logging.callbacks": "[]", "logging.wandb": "off"}
    settings |= {"logging.histograms_every": 0}  # histograms need a tracker
    own = [f"{name}={value}" for name, value in settings.items()]
    with log.open("ab") as output:
        return subprocess.Popen(**command("run", *words, *own), stdout=output, stderr=output)


def command(*words: object) -> dict[str, Any]:
    """Return the arguments and the environment of a process that runs ``tpu-grpo``."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return {"args": [sys.executable, "-m", "tpu_grpo", *map(str, words)], "env": environment}


def _digests(directory: Path) -> dict[int, str]:
    """Return the digest of the tokens of each step that a run has done so far."""
    return {line["step"]: line["rollout/tokens_digest"] for line in read_steps(directory / METRICS_FILE)}


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``done`` returns True, for at most ``seconds``; returns whether it did."""
    end = time.monotonic() + seconds
    while not (there := done()) and time.monotonic() < end:
        time.sleep(0.05)
    return there


def _failed(text: str, log: Path) -> Finding:
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return Finding("broken", f"{text}: {' '.join(last)[:300]}", f"what {log} says")
