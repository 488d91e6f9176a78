"""An Atropos environment of sums for a policy that knows only digits, '+' and '=': it asks 47+38= and wants 85.

docs/serving.md has the commands that start it. It asks through managed_server, which records tokens and
log-probabilities.
"""

import random
from typing import Any

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    ScoredDataGroup,
)


class SumsEnv(BaseEnv):
    """Sums of two numbers from 10 to 99."""

    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Return the defaults of --env and --openai that atropos_bridge.py needs."""
        config = BaseEnvConfig(
            group_size=8,
            max_num_workers=32,  # groups at a time: at least prompts_per_step of the run
            max_batches_offpolicy=64,  # twice as many; the bridge's batch is one group
            ensure_scores_are_not_same=False,  # else such a group is not sent, and its episodes wait for rewards
            steps_per_eval=0,
            worker_timeout=-1,  # between two steps of the run nobody answers
            total_steps=10**9,
            use_wandb=False,
            wandb_name="sums",
        )
        server = APIServerConfig(
            model_name="policy",
            base_url="http://127.0.0.1:9001/v1",
            api_key="none",
            server_type="sglang",
            health_check=False,  # the bridge answers /generate alone
        )
        return config, [server]

    async def setup(self) -> None:
        """Begin with the first sum of the seed."""
        self._random = random.Random(0)

    async def get_next_item(self) -> tuple[int, int]:
        """Draw two numbers."""
        return self._random.randint(10, 99), self._random.randint(10, 99)

    async def collect_trajectories(self, item: tuple[int, int]) -> tuple[ScoredDataGroup, list[Any]]:
        """Ask for one answer per trajectory, and score right answers 1, others 0."""
        a, b = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as policy:
            question = [{"role": "user", "content": f"{a}+{b}="}]
            answers = await policy.chat_completion(messages=question, n=self.config.group_size, max_tokens=8)
            nodes = policy.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(choice.message.content.strip() == str(a + b)) for choice in answers.choices],
        )
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: the bridge cannot tell evaluations from training."""


if __name__ == "__main__":
    SumsEnv.cli()
