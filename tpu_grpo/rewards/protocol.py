"""A reward is a function over the columns of a batch.

    def short(completions, limit=20, **columns):        # in my_rewards.py
        return [1.0 if len(c) <= limit else 0.0 for c in completions]

    rewards: [{name: "my_rewards.py:short", options: {limit: 40}}]

The function gets keyword arguments only, and may be ``async``. Columns are lists with a value per row, in the rollout's
order.

- ``prompts`` are the user's texts, and ``completions`` the model's texts (with an environment, the model's last turns).
  With ``messages: true``, a prompt is the list of the messages before the model's first answer, and a completion is the
  list of the messages from that answer on. Every column of the data is passed under its own name.
- ``options`` of the config are passed under their own names, and replace data columns of the same name.
- A function without ``**kwargs`` gets only the names it declares, so it may leave out what it does not need.
- A function also gets the EXTRAS (below) that it declares, unless a column or option has that name. A function with
  ``**kwargs`` gets BY_KWARGS even if it does not declare them.

A function of one row is marked, or recognised by its parameters (tpu_grpo/rewards/reward_functions.py, ``form_of``):

    @per_sample
    def short(completion, limit=20):
        return 1.0 if len(completion) <= limit else 0.0

To add a number to the advantage of each token, mark a function that takes completion_ids and returns these numbers:

    @per_token
    @per_sample
    def says_so_at_once(completion_ids):
        return [-0.01] * len(completion_ids)

A class can hold what is costly to build. The options go to the constructor. Each process that scores builds one
instance, calls ``setup`` once, and ``close`` at the end. ``setup``, ``__call__`` and ``close`` may be ``async``:

    class Judge:
        def __init__(self, url): ...
        async def setup(self): ...
        async def __call__(self, prompts, completions): ...
        async def close(self): ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

TEXT_ARGUMENTS = ("prompts", "completions")
"""These names always mean the texts, whatever columns the data has."""
SAMPLE_ARGUMENTS = {
    "prompt": "prompts",
    "completion": "completions",
    "rendered_prompt": "rendered_prompts",
    "environment": "environments",
    "environment_reward": "environment_rewards",
}
"""The parameters of a reward of one row: name for one row -> name for a batch."""
ROW_ARGUMENTS = SAMPLE_ARGUMENTS | {
    "solution_str": "completions",  # verl
    "model_output": "completions",  # verl's math_verify and prime_math
    "predict_str": "completions",  # verl's geo3k
    "response": "completions",  # verifiers before 0.1.3, and others
    "action": "completions",  # Tunix and rLLM, beside a task
    "state": "states",  # verifiers
    "task_info": "states",  # rLLM
}
"""SAMPLE_ARGUMENTS, and the names that other trainers have for the same arguments."""
COMPLETIONS = frozenset(row for row, batch in ROW_ARGUMENTS.items() if batch in ("completions", "states"))
"""Parameter names for a single completion, by which functions of one row are recognised, see ``form_of``."""
BATCH_ARGUMENTS = {"solution_strs": "completions", "completions_ids": "completion_ids"}
"""Other trainers' names for batch arguments: one of verl, and one of TRL's documentation."""
EXTRAS = {
    "rendered_prompts": "the prompts as the model sees them, chat template and system message included",
    "completion_ids": "the token ids of each completion, the stop token included",
    "environments": "the environments of the conversations as they were at the end: their attributes and methods",
    "environment_rewards": "what each conversation's environment gave for it, None for nothing",
    "step": "the number of the training step",
    "options": "the options of the config, as a dict",
    "log_metric": "log_metric(name, value): a metric rewards/<reward>/<name>, the mean of the step's values",
    "trainer_state": "an object with global_step, the number of the step, and max_steps, as TRL passes it",
    "log_extra": "TRL's function for tables of completions; does nothing here",
    "batch": "the columns of the data as a dict of lists, as in EasyDeL",
    "states": "a dict for each row, as in verifiers: prompt, completion, and the columns of the data",
    "parser": "parses completions as the option parser says, as in verifiers",
}
"""Parameters that a reward may declare in addition to texts and columns, with a description of each."""
OF_ROWS = ("rendered_prompts", "completion_ids", "environments", "environment_rewards")
"""The EXTRAS that have a value for every row."""
BY_KWARGS = ("log_metric", "trainer_state")
"""The EXTRAS that a function with ``**kwargs`` gets without declaring them, as in TRL."""
ROWS_AT_A_TIME = 64
"""The default ``concurrency`` of an async function of one row: the most rows that are awaited at a time."""
RESERVED_METRICS = ("mean", "std", "seconds", "timeouts", "errors", "weight")
"""Every reward has metrics of these names, so log_metric refuses them."""
_MARK = "__tpu_grpo_per_sample__"
_TOKEN_MARK = "__tpu_grpo_per_token__"


class Reward(Protocol):
    """Scores rows: returns a finite number per row, or None for a row to which it does not apply.

    A reward that is marked with `per_token` returns for each row a list of numbers, or None.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None] | Sequence[Sequence[float] | None]:
        """Return a value per row; ``prompts``, ``completions`` and the data columns are lists with a value per row."""
        ...


@dataclass(frozen=True)
class TrainerState:
    """The attributes of TRL's trainer that rewards written for TRL read."""

    global_step: int
    """The training step whose completions are scored, from 1; in an evaluation the last training step (or 0)."""
    max_steps: int
    """``run.max_steps``."""


@overload
def per_sample[F: Callable[..., Any]](function: F) -> F: ...
@overload
def per_sample[F: Callable[..., Any]](*, concurrency: int = ROWS_AT_A_TIME) -> Callable[[F], F]: ...
def per_sample(function: Any = None, *, concurrency: int = ROWS_AT_A_TIME) -> Any:
    """Mark a function (or a class's ``__call__``) that takes one row: ``completion``, ``prompt``, a value per column.

    The function itself is not changed, so that tests can call it. If it raises for a row, only that row has a problem
    (see ``on_error``). An ``async`` function runs for at most ``concurrency`` rows at a time.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be >= 1, got {concurrency}")

    def mark(target: Any) -> Any:
        setattr(target, _MARK, concurrency)
        return target

    return mark if function is None else mark(function)


def per_token[F: Callable[..., Any]](function: F) -> F:
    """Mark a function (or a class's ``__call__``) that returns a list with a number per token for each completion.

    The function must take ``completion_ids``, whose length is the number of tokens. The learner adds the numbers, times
    the reward's weight, to the advantages of the tokens. The numbers are not part of the total reward.
    """
    setattr(function, _TOKEN_MARK, True)
    return function


def gives_tokens(function: Any) -> bool:
    """Whether a function returns a number per token."""
    return _marked(function, _TOKEN_MARK) is not None


def rows_at_a_time(function: Any) -> int | None:
    """Return the ``concurrency`` of a function of one row; None for a function of a batch."""
    return _marked(function, _MARK)


def _marked(function: Any, mark: str) -> Any:
    """Return what a function, or the ``__call__`` of an object's class, is marked with; None if it is not marked."""
    return getattr(function, mark, getattr(getattr(type(function), "__call__", None), mark, None))  # noqa: B004
