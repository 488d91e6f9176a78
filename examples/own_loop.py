"""The GRPO loop written by hand: python examples/own_loop.py [section.key=value ...]

Teaches the model of configs/demo_cpu.yaml for ten steps and prints how its rewards grow. Every stage is one call of a
part of the run, so whatever you want to change, such as which prompts come next or which rollouts are learnt from, is
one line of `steps`. tpu_grpo/run/pipeline.py is the same loop with evaluations, checkpoints, metrics and several hosts.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import tpu_grpo
from tpu_grpo.run.inputs import open_inputs
from tpu_grpo.run.parts import Parts, build_parts

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo_cpu.yaml"


def main(overrides: Sequence[str]) -> None:
    """Build the parts of a run and drive them."""
    config = tpu_grpo.load_config(CONFIG, ["run.name=own_loop", "run.max_steps=10", *overrides])
    with tpu_grpo.start(config) as (hosts, _):  # before jax uses a device
        parts = build_parts(open_inputs(config), hosts)
        with closing(parts.task):
            for scored, update in steps(parts, config.run.max_steps):
                step, agreement = scored.rollout.batch.step, update.metrics["agreement/logprob_abs_diff_mean"]
                print(f"step {step}  reward {scored.scores.total.mean():.3f}  agreement {agreement:.1e}", flush=True)
        parts.learner.close()


def steps(parts: Parts, count: int) -> Iterator[tuple[tpu_grpo.ScoredRollout, tpu_grpo.UpdateResult]]:
    """Take ``count`` GRPO steps; yield after each the rollout with its rewards, and the result of the update."""
    for step in range(1, count + 1):
        batch = parts.task.prompts.batch(step)
        rollout = parts.sampler.rollout(batch)
        scored = tpu_grpo.ScoredRollout(rollout, parts.task.rewards.score(rollout))
        update = parts.learner.update(scored)
        parts.engines.install(parts.learner.params())
        yield scored, update


if __name__ == "__main__":
    main(sys.argv[1:])
