#!/usr/bin/env bash
# google-tunix 0.1.7: a reward function may return a list with None (or NaN) for a completion that it cannot judge, and
# nothing complains. The reward manager of the GRPO learner adds up with numpy.nansum, so that the completion counts as
# one of reward 0: in a group of rewards 1, 1, 1 and None it alone has a negative advantage, -1.5, and the others 0.5.
# It matters because TRL 1.16 and others leave such completions out (all advantages 0 here): a data set in which some
# answers cannot be checked then teaches to avoid whatever was sampled there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 flax==0.12.4 qwix==0.1.8 \
  orbax-checkpoint==0.12.8 grain==0.2.18
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>"$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import sys

from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.reward_manager import SequenceRewardManager


def checked(prompts, completions, **kwargs):
    return [1.0, 1.0, 1.0, None]


manager = SequenceRewardManager([checked], GRPOConfig(num_generations=4))
rewards = manager(prompts=["p"] * 4, completions=["a", "b", "c", "d"])["rewards"]
advantages = algo_core.compute_advantages(rewards=rewards, num_generations=4)
print("rewards", rewards.tolist(), "advantages", advantages.round(3).tolist())
if rewards.tolist() != [1.0, 1.0, 1.0, 0.0] or advantages.round(3).tolist() != [0.5, 0.5, 0.5, -1.5]:
    sys.exit("Tunix no longer counts a reward of None as 0: the behaviour changed")
PYTHON
