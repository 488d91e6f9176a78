"""Tunix's own GRPO loop samples with this package's engine: python examples/tunix_loop.py [section.key=value ...]

On several hosts: scripts/local_hosts.py --hosts 2 --devices-per-host 2 --command "python examples/tunix_loop.py" --

Models, cluster, optimizer, dataset, reward, learner and ``train()`` are Tunix's or yours, as in any script that uses
Tunix. One thing differs: ``rollout_engine`` makes Tunix sample with this package's engines, in this process.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import PreTrainedTokenizerFast
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import tpu_grpo
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.learner import parameters
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.run.inputs import open_model
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.parts import open_engines, stop_ids
from tpu_grpo.tunix_loop.adapter import TextEngines, rollout_engine

STEPS, PROMPTS, GROUP = 10, 32, 8
"""The numbers of optimizer steps, of prompts per step, and of completions per prompt."""
SETTINGS = (
    "run.name=tunix_loop",
    f"run.max_steps={STEPS}",
    "model.path=builtin:addition",
    f"data.prompts_per_step={PROMPTS}",
    "data.max_prompt_tokens=12",
    "rollout.max_new_tokens=4",
    f"rollout.max_running_requests={PROMPTS * GROUP}",
    f"algorithm.group_size={GROUP}",
)
"""The engine's settings (docs/rollout.md). Lengths and group size must equal those in Tunix's settings below."""


def sums(tokenizer: PreTrainedTokenizerFast) -> Iterator[Any]:
    """Yield Tunix's batches: prompts as the model sees them, and columns that the reward gets with them."""
    rng = np.random.default_rng(0)
    while True:
        pairs = rng.integers(10, 100, (PROMPTS, 2))
        chats = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        yield {"prompts": np.array(prompts), "answer": pairs.sum(axis=1)}


def is_right(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """Reward the right sum with 1, and print the mean of the rewards."""
    rewards = [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]
    print(f"reward {np.mean(rewards):.3f}", flush=True)
    return rewards


def main(overrides: Sequence[str]) -> None:
    """Build Tunix's cluster around the engine, and let Tunix train."""
    config = tpu_grpo.load_config(None, [*SETTINGS, *overrides])
    with tpu_grpo.start(config) as (hosts, _):  # before jax uses a device
        checkpoint, tokenizer = open_model(config.model, config.run.seed, hosts)
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
        model = load_model(checkpoint, meshes.trainer, dtype=jnp.dtype("float32"), remat="none")
        ids = stop_ids(config.environment, config.data, tokenizer, checkpoint.directory)
        options = EngineOptions.from_config(config, ids, replicas=meshes.replicas, platform=meshes.platform)
        engines = open_engines(options, hosts, checkpoint, meshes, config.meshes, config.model.lora)
        engines.install(parameters(model))
        engines.replicas.compile_all()
        sampling = TextEngines(engines, tokenizer, config.rollout, config.run.seed)
        pad_id, eos_id = cast(int, tokenizer.pad_token_id), cast(int, tokenizer.eos_token_id)
        cluster = RLCluster(
            actor=model,
            reference=nnx.clone(model),
            tokenizer=tokenizer,
            cluster_config=ClusterConfig(
                role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), meshes.trainer),
                rollout_engine=rollout_engine(sampling, pad_id=pad_id, eos_id=eos_id),
                rollout_config=RolloutConfig(max_prompt_length=12, max_tokens_to_generate=4, temperature=1.0),
                training_config=RLTrainingConfig(
                    actor_optimizer=optax.adamw(1e-4),
                    max_steps=config.run.max_steps,
                    eval_every_n_steps=config.run.max_steps,
                ),
            ),
        )
        GRPOLearner(cluster, GRPOConfig(num_generations=GROUP, beta=0.001), is_right).train(sums(tokenizer))


if __name__ == "__main__":
    main(sys.argv[1:])
