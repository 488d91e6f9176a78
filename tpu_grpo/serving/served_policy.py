"""Answers prompts with a model in its own engine: the policy of a checkpoint, an export, or any other model.

The engine's context is only as long as prompts and answers need, and it uses the fewest devices that hold the model.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_grpo.config import RunConfig
from tpu_grpo.data.chat_messages import record_of
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.sampler import completion_text, impossible, sampling_params
from tpu_grpo.environments.actions import Action
from tpu_grpo.environments.agent_conversation import read_turn
from tpu_grpo.environments.chat_format import ChatFormat, check_ids
from tpu_grpo.environments.policy_requests import RefusedError, TurnRequest
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import parameters
from tpu_grpo.models.tokenizers import check_length, decode, token_bytes
from tpu_grpo.records.errors import ConfigError, DataError, NonFiniteError, RequestError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Request, Rollout, SampleKey, Scores
from tpu_grpo.rewards import RewardSet, open_rewards
from tpu_grpo.run.inputs import check_model, open_model
from tpu_grpo.run.meshes import Meshes, default_tensor
from tpu_grpo.run.parts import open_engines, stop_ids
from tpu_grpo.run.policies import choose, load_policy

ROOM_TOKENS = 2048
"""Without prompts, there is room for at least this many tokens, if the model supports that many."""


class ServedPolicy:
    """A model that answers prompts. Its config says how to render prompts, and how to sample and score answers.

        policy = ServedPolicy(config, "latest")
        prompt = policy.prompt({"question": "47+38="})
        policy.start([prompt])                                 # builds the engine, for these prompts
        completions = policy.answer(prompt, turn=0)

    Args:
        config: the config of the model's run, or of the run whose prompt format is used for the model.
        which: the checkpoint: a step, latest, best, or initial; its weights are loaded by ``start``.
        samples: the number of answers to each prompt.
        context: the most tokens of a prompt and its answer; if None, as many as the prompts need.
        seed: the seed of sampling; if None, the run's seed.
        sampling: fields of `SamplingParams` that differ from the run's.
    """

    def __init__(
        self,
        config: RunConfig,
        which: str,
        *,
        samples: int = 1,
        context: int | None = None,
        seed: int | None = None,
        **sampling: Any,
    ):
        self._config, self.samples, self._context = config, samples, context
        self._seed = config.run.seed if seed is None else seed
        self._sampling = replace(sampling_params(config.rollout), **sampling)
        self._chosen = choose(config.run_dir, which)
        self._checkpoint, self._tokenizer = open_model(config.model, config.run.seed, Hosts())
        check_model(config, self._checkpoint)
        self._renderer = PromptRenderer(config.data, self._tokenizer)
        self._engine: Engine | None = None
        self._rewards: RewardSet | None = None

    def record(self, text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Make a data record of a prompt's text, with further columns."""
        return record_of(text, columns, self._config.data)

    def prompt(self, record: Mapping[str, Any]) -> Prompt:
        """Render a record as the run does."""
        [prompt] = self._renderer.prompts([record], ["the prompt"])
        return prompt

    def start(self, prompts: Sequence[Prompt] = ()) -> None:
        """Load the weights, and build an engine for these prompts, or for any if there are none. Raises ConfigError if
        prompt and answer may be longer than the model's context."""
        config, checkpoint = self._config, self._checkpoint
        devices = jax.devices()[: default_tensor(checkpoint, config.model.dtype, len(jax.devices()))]
        mesh = Mesh(np.asarray(devices).reshape(-1, 1), ("fsdp", "tp"))
        meshes = Meshes(mesh, None, tuple(devices), own=0, tensor=len(devices), flash_block=None)
        ids = stop_ids(config.environment, config.data, self._tokenizer, checkpoint.directory)
        options = replace(
            EngineOptions.from_config(config, ids, replicas=1, platform=meshes.platform),
            context_tokens=self.context_tokens(prompts),
            max_running_requests=min(self.samples, config.rollout.max_running_requests),
            kv_tokens=None,
            prefix_cache=True,
            batch_paddings=None,
            filtered=False,
            prefixes=None,
        )
        engines = open_engines(options, Hosts(), checkpoint, meshes, config.meshes, config.model.lora)
        engines.install(parameters(load_policy(config.model, config.run.seed, checkpoint, mesh, self._chosen)))
        [self._engine] = engines.replicas.engines.values()

    def compile_all(self) -> None:
        """Compile the engine's programs, so that no answer waits for that."""
        assert self._engine is not None, "start comes first"
        self._engine.compile_all()

    def context_tokens(self, prompts: Sequence[Prompt] = ()) -> int:
        """Return the most tokens of a prompt and its answer. Raises the errors of ``start``."""
        longest, new = self._checkpoint.hf_config.get("max_position_embeddings"), self._sampling.max_new_tokens
        if (context := self._context) is None and prompts:
            context = max(len(prompt.token_ids) for prompt in prompts) + new
        elif context is None:
            context = max(self._config.data.max_prompt_tokens + new, ROOM_TOKENS)
            context = context if longest is None else min(context, longest)
        if longest is not None and context > longest:
            raise ConfigError(
                f"a prompt and its answer must have at most {longest} tokens, the model's context, got {context}; ask "
                "for fewer with --max-new-tokens or --context"
            )
        return context

    def answer(self, prompt: Prompt, turn: int) -> list[Completion]:
        """Sample the answers to a prompt. The random numbers depend only on the seed, ``turn``, and the number of the
        answer.

        Raises:
            NonFiniteError: if a log-probability is not finite or is above 0.
        """
        assert self._engine is not None, "start comes first"
        keys = [SampleKey(self._seed, 0, turn, sample) for sample in range(self.samples)]
        completions = self._engine.generate([Request(prompt.token_ids, self._sampling, key) for key in keys])
        if any(impossible(completion).any() for completion in completions):
            raise NonFiniteError(
                "the log-probabilities of an answer must be finite and at most 0, got others: the model's weights are "
                "broken, or their numbers too large for model.dtype; name another checkpoint"
            )
        return completions

    def text(self, completion: Completion) -> str:
        """Return the text of an answer."""
        return completion_text(self._tokenizer, completion)

    def complete(self, request: Request) -> Completion:
        """Sample one completion of a request."""
        assert self._engine is not None, "start comes first"
        [completion] = self._engine.generate([request])
        return completion

    def turns(self, asked: Sequence[TurnRequest]) -> list[Action | RefusedError]:
        """Sample a turn for each request of a server, in one batch; a request that cannot be served gets a refusal.

        The tokens of a request depend on no other request, only on its prompt, ``seed`` and index.
        """
        assert self._engine is not None, "start comes first"
        read = [self._read(each) for each in asked]
        requests = [each for each in read if isinstance(each, Request)]
        completions = iter(self._engine.generate(requests) if requests else ())
        found = list[Action | RefusedError]()
        for each, request in zip(asked, read, strict=True):
            if isinstance(request, RefusedError):
                found.append(request)
                continue
            written, read = partial(decode, self._tokenizer), partial(self._parsed, each)
            pieces = partial(token_bytes, self._tokenizer)
            _, turn = read_turn(next(completions), request.token_ids, each, written, read, pieces)
            found.append(turn)
        return found

    def _parsed(self, asked: TurnRequest, ids: list[int]) -> Action:
        """Parse thinking and tool calls in an answer to chat messages; return the answer to a text prompt as text."""
        if asked.messages is not None:
            return self._dialect.with_tools(json.dumps(asked.tools)).read(ids)
        text = decode(self._tokenizer, ids, skip_special_tokens=True)
        return Action(text, text)

    @cached_property
    def _dialect(self) -> ChatFormat:
        return ChatFormat(self._tokenizer, (), self._config.environment.tool_format, self._renderer.switches)

    def _read(self, asked: TurnRequest) -> Request | RefusedError:
        """Convert a server's request to an engine's, or refuse it."""
        assert self._engine is not None
        context, given = self._engine.options.context_tokens, dict[str, Any](asked.sampling)
        try:
            if asked.messages is not None:
                ids = self._dialect.with_tools(json.dumps(asked.tools), context).prompt(asked.messages, context - 1)
            else:
                check_length(self._tokenizer, asked.text or "", context - 1)
                ids = list(asked.token_ids or ()) if asked.text is None else self._tokenizer(asked.text).input_ids
            room = context - len(ids)
            if not ids or room < 1:
                raise RequestError(f"a prompt must have 1 to {context - 1} tokens here, got {len(ids)}")
            check_ids(self._tokenizer, ids)
            seed = int(given.pop("seed", self._seed))
            most = min(asked.max_tokens or self._sampling.max_new_tokens, room)
            sampling = replace(self._sampling, max_new_tokens=most, **given)
            key = SampleKey(seed, 0, zlib.crc32(np.asarray(ids, np.int32).tobytes()) >> 1, asked.index)
            request = Request(tuple(ids), sampling, key, return_likeliest=asked.likeliest > 0)
            self._engine.check([request])
        except (ConfigError, DataError) as error:
            return RefusedError(str(error))
        except RequestError as error:
            return RefusedError(str(error), code="context_length_exceeded")
        return request

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Scores:
        """Score answers with the run's rewards, which get the columns of the prompt. Raises RewardError if the prompt
        lacks a column that a reward needs, or a reward fails."""
        columns = tuple(prompt.columns)
        if self._rewards is None:
            self._rewards = open_rewards(self._config.rewards, columns, self._config.run.max_steps)
        else:
            self._rewards = self._rewards.for_columns(columns)
        texts = tuple(map(self.text, completions))
        batch = PromptBatch(self._chosen.step or 0, (prompt,))
        return self._rewards.score(Rollout(batch, len(completions), tuple(completions), texts, seconds=0.0))

    def close(self) -> None:
        """End the processes of rewards."""
        if self._rewards is not None:
            self._rewards.close()
