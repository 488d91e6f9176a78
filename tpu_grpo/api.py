"""Training from plain Python: ``tpu_grpo.train``, and ``tpu_grpo.start`` for a training loop of your own.

    import tpu_grpo

    config = tpu_grpo.load_config("configs/demo_cpu.yaml", ["run.max_steps=5"])
    summary = tpu_grpo.train(config)
    summary = tpu_grpo.train(config, rewards=[function])     # your own functions, also from a notebook

Your own training loop builds the parts of a run inside ``start``, as examples/own_loop.py does:

    with tpu_grpo.start(config) as (hosts, watch):
        parts = build_parts(open_inputs(config), hosts)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tpu_grpo.cli.starting import start
from tpu_grpo.cli.train import train_together
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.hosts import InterruptedStop

if TYPE_CHECKING:
    from tpu_grpo.observe.callbacks import EventFunction
    from tpu_grpo.rewards import GivenReward


def train(
    config: RunConfig,
    *,
    rewards: "Sequence[GivenReward] | None" = None,
    on_step: "EventFunction | None" = None,
    on_evaluation: "EventFunction | None" = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run a config to its end, as ``scripts/run.py`` does, and leave its files in ``run.dir``.

    Chooses jax's platform, meets the other hosts of the run if there are any, and watches them. Call it before jax uses
    a device in this process. Errors are printed on stderr before they are raised, so that the first failure of several
    hosts is seen first. A run that is done already is left as it is, unless ``checkpoint.resume=never``. Ctrl-C, or the
    stop button of a notebook, stops the run as ``stop_requested`` does; a second Ctrl-C ends it immediately.

    Args:
        config: the run, from ``load_config`` or ``parse_config``.
        rewards: score with these functions or config entries in place of ``config.rewards``; the name in an entry may
            be a function. Functions that worker processes cannot import run in this process; see docs/python.md.
        on_step: called on host 0 after every step, with its metrics (a line of metrics.jsonl) and its samples (lines of
            samples.jsonl). Returning True asks the run to stop, as ``stop_requested`` does.
        on_evaluation: called in the same way after every evaluation, with step, ``evaluation/*`` metrics, and samples.
        stop_requested: called after every step; once it returns True, a checkpoint is saved and the run ends early.

    Returns:
        The content of summary.json; on hosts other than host 0 only ``params_digest``.

    Raises:
        Interrupted: if a stop was requested; the checkpoint is saved.
        CallbackError: if ``on_step`` or ``on_evaluation`` raises.
        TpuGrpoError: for anything wrong with the config, the model, the data, a reward or a number.
    """
    if rewards is not None:
        from tpu_grpo.rewards import reward_specs

        config = parse_config({**dict(config), "rewards": reward_specs(rewards)})
    with start(config) as (hosts, watch), InterruptedStop(stop_requested) as stop:
        return train_together(config, hosts, watch, stop, on_step, on_evaluation).summary
