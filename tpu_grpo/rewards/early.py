"""Groups are scored while others are still sampled, by the rewards for which that changes no value.

    early = EarlyGroups(rewards, batch, rollouts=1)       # a thread and a feed for each of these rewards
    early.add(3, completions, texts)                      # the group of prompt 3 goes to their workers at once
    early.end()                                           # that were all
    result = early.result("math", 0, prompts=range(32))   # waits for what is left

A gate's value of a group is awaited on the gate's thread, which then hands the group to the rewards behind it.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tpu_grpo.records.stages import Completion, PromptBatch, Rollout
from tpu_grpo.rewards.asking import OpenReward, RewardResult, rows_to_ask, take_in
from tpu_grpo.rewards.batches import Answer, Table, build_table, most_batches, split_group
from tpu_grpo.rewards.feed import Feed
from tpu_grpo.rewards.loading import workers_of
from tpu_grpo.rewards.shipped import SHIPPED

Group = tuple[int, int]
"""A rollout's number and a prompt's name a group."""


def early_rewards(rewards: Sequence[OpenReward]) -> list[OpenReward]:
    """Select the rewards that start early: those that may, and whose gate, if they have one, starts early too."""
    chosen = {reward.spec.shown: reward for reward in rewards if _may_start_early(reward)}
    while late := [name for name, r in chosen.items() if r.spec.only_if is not None and r.spec.only_if not in chosen]:
        for name in late:
            del chosen[name]
    return list(chosen.values())


def _may_start_early(reward: OpenReward) -> bool:
    """Follow the config, or else let functions of one row start early where they keep nobody from sampling.

    What a function of one row gives cannot depend on the other rows of a call. Shipped rewards are such functions, also
    those that take a batch. A reward that computes in the main process would keep the engine waiting for the
    interpreter, so of these only shipped ones start early that are known to be quick.
    """
    spec = reward.spec
    if spec.early is not None:
        return spec.early
    if spec.name in SHIPPED:
        return workers_of(spec) > 0 or SHIPPED[spec.name].workers == 0
    return workers_of(spec) > 0 and reward.loaded.call.concurrency is not None


class EarlyGroups:
    """The groups of ``rollouts`` rollouts of the same prompts, and what the rewards gave for them; close it at the end.

    All methods are called on one thread.
    """

    def __init__(self, rewards: Sequence[OpenReward], batch: PromptBatch, rollouts: int):
        self._batch = batch
        self._rollouts = rollouts
        self._asked = {r.spec.shown: _Asked(r, rollouts * len(batch.prompts)) for r in early_rewards(rewards)}
        self._known: set[Group] = set()
        self._threads = ThreadPoolExecutor(max(1, len(self._asked)), thread_name_prefix="early rewards")
        for asked in self._asked.values():
            if asked.reward.spec.only_if is not None:
                self._asked[asked.reward.spec.only_if].followers.append(asked)
        for asked in self._asked.values():
            asked.start(self._threads, rollouts)

    @property
    def names(self) -> set[str]:
        """Return the names of the rewards that start early."""
        return set(self._asked)

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Hand out a group, unless it is known already.

        Raises:
            RewardError: for a row that lacks a column; and if a reward whose ``on_error`` is stop had a problem with
                this or an earlier group.
        """
        for asked in self._asked.values():
            if asked.served.done():
                asked.served.result()  # raises: before the end, nothing else ends it
        if not self._asked or (rollout, prompt) in self._known:
            return
        self._known.add((rollout, prompt))
        batch, size = PromptBatch(self._batch.step, (self._batch.prompts[prompt],)), len(texts)
        table = build_table(
            Rollout(batch, size, tuple(completions), tuple(texts), seconds=0.0),
            {name for asked in self._asked.values() for name in asked.reward.loaded.batch_columns},
            numbers=range(prompt * size, (prompt + 1) * size),
        )
        for asked in self._asked.values():
            if asked.reward.spec.only_if is None:
                asked.ask((rollout, prompt), table)

    def end(self) -> None:
        """Say that all groups were added."""
        for asked in self._asked.values():
            if asked.reward.spec.only_if is None:
                asked.feed.end(self._rollouts)

    def result(self, name: str, rollout: int, prompts: Sequence[int]) -> RewardResult:
        """Wait for a reward's values of some prompts of a rollout; its gate must have ended well.

        Raises:
            RewardError: for a problem, if ``on_error`` is stop.
        """
        asked = self._asked[name]
        asked.served.result()
        return RewardResult.joined([asked.results[rollout, prompt] for prompt in prompts], asked.feed.seconds)

    def close(self) -> None:
        """Give up what is not answered yet, and end the threads."""
        for asked in self._asked.values():
            asked.feed.cancel()
        self._threads.shutdown()
        for asked in self._asked.values():
            asked.feed.close()
        self._asked = {}


@dataclass
class _Open:
    """A group of which some batches are not answered yet."""

    table: Table
    result: RewardResult
    batches: list[list[int]]
    answers: dict[int, Answer] = field(default_factory=dict)
    """The answers by the number of their batch."""


class _Asked:
    """One reward, and what it was asked and gave so far."""

    def __init__(self, reward: OpenReward, groups: int):
        call, workers = reward.loaded.call, workers_of(reward.spec)
        expected = groups * (workers if workers and call.concurrency is not None and not call.is_async else 1)
        weight = min(1.0, most_batches(workers, call) / max(1, expected))
        joins = call.is_async and call.concurrency is not None
        self.reward = reward
        self.feed = Feed(reward.spec.timeout, expected, self._take, joins=joins, weight=weight)
        self.followers: list[_Asked] = []
        """This reward is their gate."""
        self.served: Future[None] = Future()
        self.results: dict[Group, RewardResult] = {}
        self._open: dict[Group, _Open] = {}
        self._warned = False

    def start(self, threads: ThreadPoolExecutor, rounds: int) -> None:
        """Serve the feed on a thread. Those that wait for this reward's values get no more when it ends."""
        self.served = threads.submit(self.reward.executor.serve, self.feed)
        self.served.add_done_callback(lambda _: [follower.feed.end(rounds) for follower in self.followers])

    def ask(self, group: Group, table: Table, gate: RewardResult | None = None) -> None:
        """Hand out the rows of a group, or those that the gate lets pass."""
        rows, result = rows_to_ask(table, None if gate is None else gate.values, self.reward.loaded.call)
        batches = split_group(rows, workers_of(self.reward.spec), self.reward.loaded.call)
        self._open[group] = _Open(table, result, batches)
        for number, batch in enumerate(batches):
            names, messages = self.reward.loaded.batch_columns, self.reward.loaded.call.messages
            self.feed.add((group, number), table.batch(names, batch, messages=messages))
        if not batches:
            self._complete(group)

    def _take(self, key: tuple[Group, int], answer: Answer) -> None:
        """Take an answer; a problem that ends the run does so at once, also if other batches are not answered yet."""
        group, number = key
        asked, spec = self._open[group], self.reward.spec
        asked.answers[number] = answer
        if len(asked.answers) < len(asked.batches) and not (answer.problems and spec.on_error == "stop"):
            return
        for number, answer in sorted(asked.answers.items()):
            take_in(answer, asked.batches[number], spec, asked.table, asked.result, warn=not self._warned)
            self._warned |= bool(answer.problems)
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Keep a group's result, and pass the group on to those whose gate this is."""
        done = self._open.pop(group)
        self.results[group] = done.result
        for follower in self.followers:
            follower.ask(group, done.table, done.result)
