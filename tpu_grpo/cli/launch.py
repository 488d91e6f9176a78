"""The command line of ``scripts/launch.py``: what each verb does on a TPU slice."""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tpu_grpo.launching.babysit import Babysitter
from tpu_grpo.launching.jobs import (
    RUN_SCRIPT,
    Job,
    checked_config,
    lost_with_the_machine,
    require_resumable,
    secrets_here,
    variables_from,
)
from tpu_grpo.launching.kubectl import Cluster
from tpu_grpo.launching.launch_options import Options, parse
from tpu_grpo.launching.launcher import Launcher, status_lines
from tpu_grpo.launching.tpu_slice import SliceState
from tpu_grpo.observe.run_files import CONFIG_FILE, END_FILE, EVALUATION_FILE, METRICS_FILE, REPORT_FILE
from tpu_grpo.records.errors import ConfigError, TpuGrpoError

WATCHED = (CONFIG_FILE, METRICS_FILE, EVALUATION_FILE, REPORT_FILE, END_FILE)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, 2 for bad input, 1 for other errors, or for babysit the exit code of the run."""
    try:
        return _launch(parse(arguments)) or 0
    except KeyboardInterrupt:
        print("interrupted; what runs on the workers goes on, `status` shows it", file=sys.stderr)
        return 1
    except TpuGrpoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _launch(options: Options) -> int | None:
    if options.on == "gke" and options.verb != "watch":  # which needs a bucket only
        return _on_gke(Cluster(options), options)
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_launch_") as scratch:
        launcher = Launcher(options, Path(scratch))
        tpu = launcher.tpu
        match options.verb:
            case "create":
                tpu.create()
                if not options.no_wait:
                    tpu.wait()
            case "setup":
                tpu.require_ready()
                launcher.setup()
            case "run":
                _run(launcher, options)
            case "status":
                state = tpu.look()
                print("\n".join(status_lines(state, launcher.status() if state.condition == "ready" else {})))
            case "logs" if options.follow:
                launcher.follow(options.lines, tpu.require_ready().workers)
            case "logs":
                if text := launcher.logs(options.lines):
                    print(text)
            case "watch":
                _watch(launcher, options)
            case "stop":
                after = launcher.stop(options.grace)
                print("\n".join(status_lines(SliceState("ready", "stopped"), after)))
            case "delete":
                tpu.delete()
            case "babysit":
                return _babysit(launcher, options)
    return None


def _on_gke(cluster: Cluster, options: Options) -> None:
    match options.verb:
        case "run":
            cluster.apply(_job(options, "checkpoint.resume=auto"))
        case "logs":
            cluster.logs(options.lines, follow=options.follow)
        case "delete":
            cluster.delete()
        case verb:
            print("\n".join(cluster.status() if verb == "status" else cluster.stop(options.grace)))


def _run(launcher: Launcher, options: Options) -> None:
    job = _job(options)
    config = checked_config(job, options.slices)
    state = launcher.tpu.require_ready()
    if config is not None and state.workers > 1 and (why := lost_with_the_machine(config.run_dir)):
        launcher.gcloud.say(
            f"careful: run.dir={config.run_dir} {why}, and workers share none: each would write its part of the "
            "checkpoints to its own; give a directory that all of them mount"
        )
    job_id = launcher.start(job, state)
    launcher.gcloud.say(f"started {job_id}; `logs --follow` shows it, `status` says how it stands")


def _babysit(launcher: Launcher, options: Options) -> int:
    job = _job(options, "checkpoint.resume=auto")
    config = checked_config(job, options.slices)
    if config is None:
        raise ConfigError(
            f"--script must be {RUN_SCRIPT} for babysit, which relies on its exit codes, got {job.script}"
        )
    require_resumable(config.run_dir, config.checkpoint.every, survives=options.run_dir_survives)
    run_dir = None if options.run_dir_survives else config.run_dir
    babysitter = Babysitter(launcher, job, options.poll, options.restarts, run_dir)
    if options.dry_run:
        babysitter.rehearse()
        return 0
    return babysitter.run()


def _watch(launcher: Launcher, options: Options) -> None:
    from tpu_grpo.observe.json_lines import numbers  # imports NumPy
    from tpu_grpo.observe.standing import Standing
    from tpu_grpo.report.run_reader import read_run

    into = options.to or Path("watched", PurePosixPath(options.run_dir).name)
    launcher.gcloud.say(
        f"look at {into / REPORT_FILE}, which a browser loads again by itself; Ctrl-C ends the looking only"
    )
    standing = Standing("going")
    while standing.outcome == "going":
        (into / END_FILE).unlink(missing_ok=True)  # outdated if the run has been resumed
        launcher.bring(WATCHED, options.run_dir, into)
        if launcher.gcloud.dry_run:
            return
        run = read_run(into, goes_on=not (into / END_FILE).exists())
        if (run.standing.step, run.standing.outcome) != (standing.step, standing.outcome):
            rewards = numbers(run.lines, "rewards/mean")
            print(run.standing.sentence, f"reward {rewards[-1]:.3f}" if rewards else "", flush=True)
        standing = run.standing
        if standing.outcome == "going":
            time.sleep(options.poll)


def _job(options: Options, *more: str) -> Job:
    words, variables = (*options.words, *more), variables_from(options.env)
    secrets, cache = secrets_here(options.secret), options.compilation_cache
    return Job(options.config, words, options.script, variables, secrets, cache, options.libtpu_args)
