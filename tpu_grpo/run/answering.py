"""A model that answers prompts of people: the policy of a checkpoint, an export, or any model, in an engine by itself.

    speaker = Speaker.open(config, chosen, asked)
    prompt = speaker.prompt({"question": "47+38="})
    speaker.start([prompt])                                 # builds the engine, for these prompts
    for answers in speaker.answer(prompt, turn=0, cancelled=lambda: False):
        ...

The engine is as small as the answers allow, and on as few devices as hold the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.data import Message, PromptRenderer
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.generation import Partial
from tpu_grpo.engine.options import EngineOptions, choose_attention
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import completion_text, sampling_params, stream
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import parameters
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.tokenizers import TextStream
from tpu_grpo.records.errors import ConfigError, RequestError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Request, Rollout, SampleKey, SamplingParams, Scores
from tpu_grpo.rewards import RewardSet, open_rewards
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.run.environments import stop_ids
from tpu_grpo.run.meshes import default_tensor
from tpu_grpo.run.parts import open_model
from tpu_grpo.run.saved import Chosen, load_policy

STEPS_PER_LAUNCH = 4
"""Text is told after so many tokens; fewer would be slower, and more would come in leaps."""
CHAT_TOKENS = 2048
"""A conversation has room for so many tokens at least, if the model takes them."""


@dataclass(frozen=True)
class Asked:
    """How answers are asked for; what is None is as in the run."""

    samples: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    context: int | None = None
    """The most tokens of a conversation and its answer."""


class Speaker:
    """One model that answers. Its config says how prompts are written and how answers are sampled and scored."""

    def __init__(
        self,
        config: RunConfig,
        chosen: Chosen,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerFast,
        asked: Asked,
    ):
        self.config, self.tokenizer = config, tokenizer
        self._chosen, self._checkpoint, self._asked = chosen, checkpoint, asked
        self._stop_ids = frozenset(stop_ids(config, tokenizer, checkpoint.directory))
        self._renderer = PromptRenderer(config.data, tokenizer)
        self._seed = config.run.seed if asked.seed is None else asked.seed
        self._engine: Engine | None = None
        self._rewards: RewardSet | None = None

    @classmethod
    def open(cls, config: RunConfig, chosen: Chosen, asked: Asked) -> "Speaker":
        """Open a model's checkpoint and tokenizer; its weights are loaded by ``start``."""
        checkpoint, tokenizer = open_model(config, Hosts())
        return cls(config, chosen, checkpoint, tokenizer, asked)

    @property
    def sampling(self) -> SamplingParams:
        """How answers are sampled."""
        given = {
            name: getattr(self._asked, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
        }
        return replace(sampling_params(self.config), **{name: v for name, v in given.items() if v is not None})

    @property
    def samples(self) -> int:
        """The answers to each prompt."""
        return self._asked.samples

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prompt(self, record: Mapping[str, Any], history: Sequence[Message] = ()) -> Prompt:
        """Write a record as the run does, after what was said before."""
        where = ["the prompt"]
        [prompt] = self._renderer.prompts([record], where)
        if not history:
            return prompt
        messages = [*history, prompt.conversation[-1]]
        [text] = self._renderer.texts([messages], where)
        [token_ids] = self._renderer.encoded([text], where)
        return replace(prompt, text=text, token_ids=tuple(token_ids), messages=messages)

    # --- answers ------------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Prompt] | None = None) -> None:
        """Load the weights, and build an engine for these prompts, or for a conversation if there are none.

        Raises:
            ConfigError: for more tokens than the model takes.
        """
        devices = jax.devices()[: default_tensor(self.config, self._checkpoint, len(jax.devices()))]
        options = self._options(self._context(prompts), devices[0].platform)
        replicas = Replicas.build(self._checkpoint.directory, devices, len(devices), options, Hosts())
        rules = self._checkpoint.weight_rules
        engines = SyncedEngines(replicas, rules, self.tokenizer, self.config, Hosts())
        mesh = Mesh(np.asarray(devices).reshape(-1, 1), ("fsdp", "tp"))
        engines.install(parameters(load_policy(self.config, self._checkpoint, mesh, self._chosen)))
        [self._engine] = replicas.engines.values()

    def answer(self, prompt: Prompt, turn: int, cancelled: Callable[[], bool]) -> Iterator[list[Partial]]:
        """Sample answers, and yield what there is of each after every few tokens.

        Tokens depend on the seed, the number of the turn and that of the answer, as all tokens of a run do.

        Raises:
            RequestError: there is no room for the prompt and an answer.
        """
        assert self._engine is not None, "start comes first"
        self._check(prompt)
        keys = (SampleKey(self._seed, 0, turn, sample) for sample in range(self.samples))
        requests = [Request(prompt.token_ids, self.sampling, key) for key in keys]
        return stream(self._engine, requests, cancelled)

    def complete(self, request: Request) -> Completion:
        """Sample one completion, as its request says."""
        assert self._engine is not None, "start comes first"
        [completion] = self._engine.generate([request])
        return completion

    def texts(self) -> list[TextStream]:
        """Make what tells the text of each answer."""
        return [TextStream(self.tokenizer) for _ in range(self.samples)]

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Scores:
        """Score answers by the run's rewards, which get the columns of the prompt.

        Raises:
            RewardError: for a column that a reward needs and the prompt lacks, and for a reward that fails.
        """
        columns = tuple(prompt.columns)
        if self._rewards is None:
            self._rewards = open_rewards(self.config.rewards, columns, self.config.run.max_steps)
        else:
            self._rewards = self._rewards.for_columns(columns)
        texts = tuple(completion_text(self.tokenizer, c) for c in completions)
        batch = PromptBatch(self._chosen.step or 0, (prompt,))
        return self._rewards.score(Rollout(batch, len(completions), tuple(completions), texts, seconds=0.0))

    def close(self) -> None:
        """End the processes of rewards."""
        if self._rewards is not None:
            self._rewards.close()

    def _check(self, prompt: Prompt) -> None:
        """See that there is room for an answer.

        Raises:
            RequestError: there is none.
        """
        assert self._engine is not None, "start comes first"
        tokens, context = len(prompt.token_ids), self._engine.options.context_tokens
        if tokens + self.sampling.max_new_tokens > context:
            raise RequestError(
                f"a conversation and its answer must have at most {context} tokens here, got {tokens} and up to "
                f"{self.sampling.max_new_tokens} more; begin anew with /reset, allow fewer with --max-new-tokens, or "
                "more with --context"
            )

    def _context(self, prompts: Sequence[Prompt] | None) -> int:
        longest = self._checkpoint.hf_config.get("max_position_embeddings")
        new = self.sampling.max_new_tokens
        if self._asked.context is not None:
            context = self._asked.context
        elif prompts is not None:
            context = max(len(prompt.token_ids) for prompt in prompts) + new
        else:
            context = max(self.config.data.max_prompt_tokens + new, CHAT_TOKENS)
            context = context if longest is None else min(context, longest)
        if longest is not None and context > longest:
            raise ConfigError(
                f"a prompt and its answer must have at most {longest} tokens, the model's context, got {context}; ask "
                "for fewer with --max-new-tokens or --context"
            )
        return context

    def _options(self, context: int, platform: str) -> EngineOptions:
        rollout = self.config.rollout
        return EngineOptions(
            context_tokens=context,
            stop_token_ids=self._stop_ids,
            dtype=self.config.model.dtype,
            attention=choose_attention("auto", platform),
            max_running_requests=min(self.samples, rollout.max_running_requests),
            kv_tokens=None,
            page_size=rollout.page_size,
            prefill_tokens=rollout.prefill_tokens,
            prefix_cache=True,
            batch_paddings=None,
            shard_vocab=None,
            steps_per_launch=STEPS_PER_LAUNCH,
        )
