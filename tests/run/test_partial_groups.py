"""Completions that are carried over from step to step: tokens, the length of a step, and what a checkpoint holds."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.models.random_checkpoint import edit_config
from tests.several.runs import laid_over, lines, settings, train, write_files
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.engine.partial_rollouts import NEW, Cutoff, PartialGroup, ages_of, continued
from tpu_grpo.engine.sampler import SampledGroups
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.episode import Branch, Episode
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Request, SampleKey, SamplingParams
from tpu_grpo.run.inputs import open_inputs
from tpu_grpo.run.partial_groups import PartialGroups, written
from tpu_grpo.run.parts import build_parts

TOKENS = 64
STOPS = [*range(10, 22)]
"""These tokens end a completion, out of 260, so that lengths have a tail."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_files(tmp_path_factory.mktemp("files"), layers=1)
    edit_config(directory / "model", eos_token_id=STOPS)
    return directory


def carrying(files: Path, run_dir: Path, **sections: Any) -> RunConfig:
    tree = settings(
        run_dir,
        run={"max_steps": 5, "seed": 3},
        model={"path": str(files / "model")},
        data={"path": str(files / "data.jsonl")},
        rollout={"max_new_tokens": TOKENS, "partial_extra": 0.5, "batch_paddings": [32], "max_running_requests": 32},
        rewards=[{"name": f"{files / 'rewards.py'}:ascii_share", "workers": 0}],
        meshes={"sampler": {"tensor": 2}},  # two engines to compile
    )
    return parse_config(laid_over(tree, sections))


def test_a_step_ends_with_the_length_at_which_enough_groups_are_whole() -> None:
    """Of the groups of 2, group 0 ends after 40 tokens, 1 after 17, 2 after 30, and 3 is whole already."""
    request = Request((1,), SamplingParams(100), SampleKey(0, 1, 0, 0))

    def completion(tokens: int) -> Completion:
        return Completion(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", 0)

    def length(wanted: int, due: tuple[int, ...] = ()) -> int | None:
        cut = Cutoff([(0, 1), (2, 3), (4, 5), ()], wanted, due)
        for index, tokens in enumerate((40, 3, 17, 17, 30)):
            cut.add(index, request, completion(tokens))
        unknown = cut.length
        cut.add(5, request, completion(2))
        cut.add(5, request, completion(90))  # told twice: nothing changes
        assert unknown is None or unknown >= (cut.length or 0)
        return cut.length

    assert [length(wanted) for wanted in (1, 2, 3, 4)] == [0, 32, 32, 48]
    assert length(1, due=(0,)) == 48
    cut = Cutoff([(0,)], 1)
    cut.add(0, request, replace(completion(50), finish_reason="length"))  # stopped by the cut, not by itself
    assert cut.length is None
    cut.add(0, request, replace(completion(100), finish_reason="length"))
    assert cut.length == 112


def opened(config: RunConfig, stream: Any, saved: Any) -> PartialGroups:
    return PartialGroups(config.data, config.rollout, config.algorithm, config.environment, stream, saved)


def test_groups_of_a_step_have_numbers_of_their_own() -> None:
    """A continued run may have dropped group 0 of a step whose group 1 it has kept: its settings were changed."""
    carry = opened(parse_config({"rollout": {"partial_extra": 0.5}}), None, None)
    prompt = Prompt("", (1,))
    carry.groups = (PartialGroup(prompt, 7, 7, step=2, number=1, completions=(NEW,)),)
    carry.begin(PromptBatch(2, (prompt, prompt), (8, 9), (8, 9)))
    assert [(group.record, group.step, group.number) for group in carry.groups] == [(7, 2, 1), (8, 2, 2), (9, 2, 3)]


def test_a_completion_keeps_the_tokens_before_the_cut() -> None:
    request = Request((1,), SamplingParams(5), SampleKey(0, 1, 0, 0))
    new = Completion(np.arange(5, dtype=np.int32), np.array([-1, -2, -3, -4, -5], np.float32), "length", 0)
    first = continued(NEW, request, new, 3)
    assert (first.token_ids.tolist(), first.finish_reason) == ([0, 1, 2], "cut")
    whole = continued(first, request, new, 5)
    assert (whole.token_ids.tolist(), whole.finish_reason) == ([0, 1, 2, 0, 1, 2, 3, 4], "length")
    assert whole.logprobs.tolist() == [-1, -2, -3, -1, -2, -3, -4, -5]


@pytest.mark.full
def test_tokens_are_those_of_a_rollout_that_waits(files: Path, tmp_path: Path) -> None:
    """With weights that do not change, several steps sample together what one rollout of the same prompts does."""
    parts = build_parts(open_inputs(carrying(files, tmp_path / "run")), Hosts())
    carry, stream = parts.partial, parts.task.prompts
    assert carry is not None
    whole = parts.sampler.rollout(stream.at(1, range(6)))
    ends = np.array([len(c.token_ids) for c in whole.completions]).reshape(6, 4).max(axis=1)
    carry.begin(stream.at(1, range(6)))
    first = parts.sampler.go_on(1, carry.groups, 2, [], [None] * 6)()
    assert first.length == -(-int(np.sort(ends)[1]) // 16) * 16 < TOKENS
    for group, end in zip(first.groups, ends, strict=True):
        assert group.is_whole == (end <= first.length)
    step, groups = 1, first.groups
    while not all(group.is_whole for group in groups):
        step += 1
        groups = tuple(group.older() for group in groups)
        groups = parts.sampler.go_on(step, groups, 1 + sum(g.is_whole for g in groups), [], [None] * 6)().groups
    assert step > 1
    found = [completion for group in groups for completion in group.completions]
    for one, right in zip(found, whole.completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, right.token_ids)
        np.testing.assert_allclose(one.logprobs, right.logprobs, rtol=0, atol=1e-5)
        assert one.finish_reason == right.finish_reason
        assert one.ages is not None
        assert (np.diff(one.ages) <= 0).all()


@pytest.fixture(scope="module")
def run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    train(carrying(files, run_dir))
    return lines(run_dir)


SAME = ("rollout/tokens_digest", "rewards/mean", "update/loss", "partial/length", "partial/rows_age_1")


@pytest.mark.full
def test_groups_are_learnt_from_once_whole(run: list[dict[str, Any]]) -> None:
    assert all(line["agreement/logprob_abs_diff_max"] < 1e-5 for line in run)
    assert all(line["partial/length"] % 16 == 0 for line in run)
    assert any(line["partial/length_saved"] > 0 for line in run)
    assert [line["partial/open_groups"] for line in run] == [2] * 5
    assert run[0]["partial/rows_age_1"] == 0.0
    assert any(line["partial/tokens_age_1"] > 0.0 for line in run)
    aged = [line for line in run if line["partial/tokens_age_1"] + line["partial/tokens_age_2_up"] > 0.0]
    assert all(line["agreement/older_logprob_abs_diff_max"] > 1e-4 for line in aged)  # other weights sampled these


@pytest.mark.full
@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({"steps_per_launch": 1}, id="a step a launch", marks=pytest.mark.slow),
        pytest.param({"kv_tokens": 160}, id="a small cache", marks=pytest.mark.slow),
        pytest.param({"batch_paddings": [2, 8], "max_running_requests": 8}, id="other paddings"),
    ],
)
def test_tokens_depend_on_no_setting_of_the_engine(
    files: Path, tmp_path: Path, run: list[dict[str, Any]], rollout: dict[str, Any]
) -> None:
    train(carrying(files, tmp_path / "run", rollout=rollout, run={"max_steps": 3}))
    found = lines(tmp_path / "run")
    assert [line["rollout/tokens_digest"] for line in found] == [line["rollout/tokens_digest"] for line in run[:3]]
    assert [line["partial/length"] for line in found] == [line["partial/length"] for line in run[:3]]


@pytest.mark.full
def test_a_run_goes_on_with_the_groups_of_its_checkpoint(
    files: Path, tmp_path: Path, run: list[dict[str, Any]]
) -> None:
    """It goes on after step 1: the groups of step 2 are damaged."""
    train(carrying(files, tmp_path / "run", run={"max_steps": 2}, checkpoint={"every": 1}))
    groups = tmp_path / "run/checkpoints/2/carried_groups/groups.json"
    groups.write_bytes(groups.read_bytes()[:-9])
    train(carrying(files, tmp_path / "run", checkpoint={"every": 1}))
    assert (tmp_path / "run/damaged_checkpoints/2").is_dir()
    found = lines(tmp_path / "run")
    assert [[line[name] for name in SAME] for line in found] == [[line[name] for name in SAME] for line in run]


def test_a_checkpoint_holds_every_bit_of_a_group(files: Path, tmp_path: Path) -> None:
    config = carrying(files, tmp_path / "run")
    completion = Completion(np.array([5, 6], np.int32), np.array([-0.1, -1 / 3], np.float32), "cut", 0)
    completion = replace(completion, ages=np.array([2, 0], np.int32))
    whole = replace(completion, finish_reason="stop")
    group = PartialGroup(Prompt("a", (1, 2)), 3, 11, 7, 1, (completion, whole, completion, NEW))

    class Stream:
        size = 4

        def prompt(self, record: int) -> Prompt:
            assert record == 3 < self.size
            return group.prompt

    stream: Any = Stream()
    saved = json.loads(json.dumps(written([group])))
    [found] = opened(config, stream, saved).groups
    assert written([found]) == saved
    assert found.completions[0].token_ids.tolist() == [5, 6]
    assert found.completions[0].logprobs.tobytes() == completion.logprobs.tobytes()
    assert [ages_of(c).tolist() for c in found.completions] == [[2, 0]] * 3 + [[]]
    assert (found.position, found.step, found.number, found.prompt) == (11, 7, 1, group.prompt)
    assert [c.finish_reason for c in found.completions] == ["cut", "stop", "cut", "cut"]
    group = replace(group, prompt=Prompt("a", (1, 3)))  # the data has changed
    assert opened(config, stream, saved).groups == ()
    group = replace(group, prompt=Prompt("a", (1, 2)))
    stream.size = 3  # there are fewer prompts now
    assert opened(config, stream, saved).groups == ()
    stream.size = 4
    assert len(opened(config, stream, saved).groups) == 1
    talking = parse_config(
        {
            "environment": {"name": "guessing"},
            "algorithm": {"group_size": 4, "staleness": 1, "routing_replay": True},
            "meshes": {"layout": "split"},
        }
    )
    branch = Branch((), 0, 2, np.zeros((3, 1, 2), np.uint8))
    conversation = replace(whole, episode=Episode("a", (branch,), (), "done", (), "guessing"))
    told = written([replace(group, completions=(conversation,) * 4)])
    assert len(opened(talking, stream, told).groups) == 1  # the experts of a conversation are in its branches
    assert opened(config, stream, told).groups == ()
    changes: list[dict[str, Any]] = [{"rollout": {"max_new_tokens": 1}}, {"algorithm": {"group_size": 2}}]
    for changed in changes:
        assert opened(carrying(files, tmp_path / "run", **changed), stream, saved).groups == ()


def test_a_continued_step_that_was_sampled_ahead_has_the_figures_of_its_sampling(files: Path, tmp_path: Path) -> None:
    """With staleness, step 2 was sampled before checkpoint 1; the continued run finds its groups in there."""
    config = carrying(files, tmp_path / "run")
    completion = Completion(np.array([5, 6], np.int32), np.array([-0.1, -0.2], np.float32), "stop", 0)
    group = PartialGroup(Prompt("a", (1, 2)), 3, 11, 1, 0, (completion,) * 4)
    stream: Any = SimpleNamespace(size=4, prompt=lambda record: group.prompt)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "")
    sampled = SampledGroups(groups=(group,), length=1, dropped=3, seconds=2.0, figures={})
    carry = opened(config, stream, None)
    carry.take(2, sampled, tokenizer)
    carry.hold()
    saved = json.loads(json.dumps(carry.saved()))
    whole = carry.end(used=1)
    assert (whole["partial/length"], whole["partial/length_saved"], whole["partial/dropped_tokens"]) == (1, 1, 3)
    again = opened(config, stream, saved)
    again.take(2, replace(sampled, groups=again.groups, length=0, dropped=0, seconds=0.0), tokenizer)
    continued = again.end(used=1)
    assert {name: value for name, value in continued.items() if "partial/" in name}.items() <= whole.items()
    assert carry.saved()["sampled"] == again.saved()["sampled"] == [0, 0]


@pytest.mark.slow
def test_a_group_is_finished_after_so_many_steps(files: Path, tmp_path: Path) -> None:
    config = carrying(files, tmp_path / "run", rollout={"partial_steps": 1})
    train(config)
    assert all(line["partial/rows_age_2_up"] == 0.0 for line in lines(tmp_path / "run"))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"environment": {"name": "guessing"}}, "rollout.partial_extra=0.5 does not go with environment.name"),
        ({"algorithm": {"name": "tunix:grpo"}}, "does not go with algorithm.name=tunix:grpo"),
        ({"data": {"path": "x", "dynamic": {"extra": 0.5}}}, "does not go with data.dynamic.extra"),
        ({"algorithm": {"routing_replay": True}}, "does not go with algorithm.routing_replay=true"),
        (
            {"algorithm": {"staleness": 1, "name": "tunix:grpo"}, "rollout": {"partial_extra": 0.0}},
            "algorithm.staleness=1 does not go with algorithm.name=tunix:grpo",
        ),
        ({"algorithm": {"staleness": 1}}, "staleness=1 needs meshes.layout=split, got shared"),
    ],
)
def test_what_cannot_be_carried_is_refused(files: Path, tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        carrying(files, tmp_path / "run", **sections)
