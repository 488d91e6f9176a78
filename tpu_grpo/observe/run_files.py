"""The name of every file and directory of ``run.dir``, in the order in which they appear.

All code that writes or reads such a file takes the name from here. docs/running.md describes the files for users.
"""

from pathlib import Path

CONFIG_FILE = "config.yaml"
"""The resolved config, with every setting; its presence marks a directory as a run's."""
CHANGES_FILE = "changes.jsonl"
"""Holds a line per setting or source file that was changed when the run was continued: step, name, old and new."""
SOURCES_FILE = "sources.json"
"""Holds digests of the files that settings name: the user's code, and the model."""
LOCK_FILE = "run.lock"
"""Names the process that uses the directory, which removes the file at its end; a killed process's file is ignored."""
LOGS_DIR = "logs"
"""Holds a log per host, ``host_<index>.log``; if an error ended the run on a host, its log has the traceback."""
PROFILE_DIR = "profile"
"""Holds every host's timelines of the steps of ``logging.profile_steps``, for Perfetto and for TensorBoard."""
CHECKPOINTS_DIR = "checkpoints"
"""Holds a directory per saved step with policy and optimizer state, as Orbax writes them."""
RUN_FILE = "run_id"
"""Holds the id of the run, which its checkpoints also hold; checkpoints with another id are refused."""
DAMAGED_DIR = "damaged_checkpoints"
"""Holds checkpoints that could not be read, by step; the run then continued from an older one."""
DATA_FILE = "data.json"
"""Describes the data: its digest, and for each source the numbers of prompts and of dropped prompts."""
METRICS_FILE = "metrics.jsonl"
"""Holds a line per step with all of its metrics."""
SAMPLES_FILE = "samples.jsonl"
"""Holds a line per completion of every step whose samples were logged (``logging.samples_every``)."""
EPISODES_DIR = "episodes"
"""Holds agents' requests and the results that agents reported, in a file per step and host. When a continued
run repeats a step, it takes the episodes from these files."""
HISTORY_FILE = "history.jsonl"
"""Holds a line per step with the indices of its training prompts, and results of each prompt's group."""
WANDB_DIR = "wandb"
"""Holds the files of Weights & Biases, and the id of its run, which a resumed run continues."""
TENSORBOARD_DIR = "tensorboard"
"""Holds event files for TensorBoard, one for each part of the run (``logging.tensorboard``)."""
EVALUATION_FILE = "evaluation.jsonl"
"""Holds a line per evaluation with its estimates, their intervals and a digest of all tokens."""
EVALUATIONS_DIR = "evaluations"
"""Holds ``<step>.jsonl`` with the completions of each evaluation, and ``checkpoint_<step>.jsonl`` and ``.json`` for a
checkpoint that was evaluated without training."""
BEST_FILE = "best.json"
"""Names the step with the best evaluation so far, its value and its interval."""
ADAPTERS_DIR = "adapters"
"""Holds a directory per saved step with the LoRA adapters alone, in the format of PEFT."""
EXPORTS_DIR = "exports"
"""Holds the model that ``export.every`` exports at the end: a directory named by step, in Hugging Face's format."""
EXPORTED_CONFIG_FILE = "tpu_grpo.yaml"
"""Holds the run's config, in a directory that was exported."""
END_FILE = "end.json"
"""Says how the run ended: outcome, exit code, message, step and time; missing while the run goes on."""
SUMMARY_FILE = "summary.json"
"""Holds the last value of every metric, and figures of the whole run; written when the run is done."""
REPORT_FILE = "report.html"
"""Shows the run on one page; written while the run goes on, and however it ends."""
PLAN_FILE = "plan.json"
"""Holds a plan, if the user has put one there (scripts/plan.py --json); the run compares its times with the plan's."""
CHECK_FILE, CHECK_PAGE = "check.json", "check.html"
"""What `tpu-grpo check` found, in a directory beside run.dir; see `check_directory`."""
FROM_WEIGHTS = "export its weights (scripts/export.py RUN --out DIR) for a run with model.path=DIR in another run.dir"
"""What to do with a run that cannot go on with other settings."""
REPLACED_FILES = (BEST_FILE, END_FILE, REPORT_FILE)
"""The files that a run only writes, and replaces as a whole."""
DIRECTORIES = (
    LOGS_DIR,
    PROFILE_DIR,
    CHECKPOINTS_DIR,
    DAMAGED_DIR,
    WANDB_DIR,
    TENSORBOARD_DIR,
    EPISODES_DIR,
    EVALUATIONS_DIR,
    ADAPTERS_DIR,
    EXPORTS_DIR,
)


def saved_steps(directory: Path) -> tuple[int, ...]:
    """List the steps saved in a directory of checkpoints, ascending; unfinished checkpoints are left out."""
    names = [path.name for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    return tuple(sorted(int(name) for name in names if name.isdecimal() and name == str(int(name))))


def check_directory(run_dir: Path) -> Path:
    """Return the directory beside run.dir that a check of the run writes to; only the run itself writes to run.dir."""
    return run_dir.with_name(f"{run_dir.name}_check")


def plan_of(run_dir: Path) -> Path | None:
    """Return the file of a run's plan: plan.json in run.dir, or what `tpu-grpo check` found; None without a plan."""
    return next((p for p in (run_dir / PLAN_FILE, check_directory(run_dir) / CHECK_FILE) if p.exists()), None)
