"""Measures rewards: completions per second in the main process and in workers, and the cost of workers per batch.

python benchmarks/rewards.py [--rows 512] [--repeats 5]
"""

import argparse
import statistics

import numpy as np

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout
from tpu_grpo.rewards import open_rewards

GROUP = 8
NOTHING = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)


def rollout(rows: int, *, boxed: bool) -> Rollout:
    """Make groups of different solutions of about 150 words; every other solution is right."""
    prompts, texts = [], []
    for p in range(rows // GROUP):
        prompts.append(Prompt(f"problem {p}", (), {"answer": rf"\frac{{{p + 1}}}{{7}}" if boxed else f"#### {p}"}))
        for g in range(GROUP):
            steps = " ".join(f"Step {s}: we have {s + g} + {p} = {s + g + p} apples." for s in range(14))
            wrong = g % 2
            end = rf"\boxed{{{2 * (p + 1) + wrong}/14}}" if boxed else f"#### {p + wrong}"
            texts.append(f"{steps} Sample {g}. {end}")
    return Rollout(PromptBatch(0, tuple(prompts)), GROUP, (NOTHING,) * len(texts), tuple(texts), 0.0)


def seconds_per_batch(spec: RewardSpec, batch: Rollout, repeats: int) -> float:
    """Return the median seconds of a batch, after a first batch, which starts workers and imports modules."""
    with open_rewards([spec], ["answer"]) as rewards:
        scores = rewards.score(batch)
        expected = np.tile([1.0, 0.0], len(batch.texts) // 2)
        if spec.label is None:
            np.testing.assert_array_equal(scores.total, expected)
        return statistics.median(rewards.score(batch).seconds for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    places = {0: "in process", 1: "1 worker", 2: "2 workers"}
    for name in ("gsm8k", "math"):
        batch = rollout(options.rows, boxed=name == "math")
        for workers, place in places.items():
            spec = RewardSpec(name=name, workers=workers, timeout=600)
            seconds = seconds_per_batch(spec, batch, options.repeats)
            print(f"{name:8} {place:12} {options.rows / seconds:10,.0f} completions/s", flush=True)
    batch = rollout(options.rows, boxed=False)
    for workers, place in places.items():
        spec = RewardSpec(name="integer_answer", label="nothing", workers=workers)
        seconds = seconds_per_batch(spec, batch, 10 * options.repeats)
        print(f"a batch of {options.rows} that costs nothing, {place:12} {1000 * seconds:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
