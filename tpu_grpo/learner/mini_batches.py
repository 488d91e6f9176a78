"""Which prompts each update on a rollout learns from.

Every iteration over a step draws its own order of the prompts, by run.seed, step and iteration, alike on every host,
and cuts it into mini-batches of one size (PPO, Schulman et al. 2017, arXiv 1707.06347, algorithm 1). Of 4 prompts, two
at a time:

    iteration 1    [2 0] [3 1]
    iteration 2    [1 2] [0 3]

A prompt keeps its completions together.
"""

from collections.abc import Iterator

import numpy as np


def mini_batches(prompts: int, size: int, seed: int, step: int, iteration: int) -> Iterator[list[int]]:
    """Shuffle the numbers of the prompts, and give them out ``size`` at a time; ``size`` divides ``prompts``."""
    order = np.random.default_rng([seed, step, iteration]).permutation(prompts).tolist()
    yield from (order[start : start + size] for start in range(0, prompts, size))
