"""Teachers of a learner: what they say against NumPy, hints, columns, averages, and what is not finite."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests.learner.toy import (
    VOCAB,
    flat_params,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    model_logps,
    with_completion,
)
from tpu_grpo.config import RunConfig
from tpu_grpo.learner import FrozenModel, TeacherInputs
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.teachers import Insertion
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import ScoredRollout


def config_of(directory: Path, teachers: list[dict[str, Any]], layout: str = "shared", **algorithm: Any) -> RunConfig:
    chosen = {"name": "distill", "micro_batch_prompts": 4, **algorithm}
    tree: dict[str, Any] = {"algorithm": chosen, "teachers": teachers, "meshes": {"layout": layout}}
    return make_config(directory, tree)


def given(*seeds: int, offload: bool = False) -> tuple[TeacherInputs, ...]:
    return tuple(TeacherInputs(FrozenModel(make_model(make_mesh(1), seed), offload=offload)) for seed in seeds)


def with_columns(scored: ScoredRollout, column: str, values: Sequence[Any]) -> ScoredRollout:
    batch = scored.rollout.batch
    pairs = zip(batch.prompts, values, strict=True)
    prompts = tuple(replace(prompt, columns={column: value}) for prompt, value in pairs)
    return replace(scored, rollout=replace(scored.rollout, batch=replace(batch, prompts=prompts)))


def rows_of(scored: ScoredRollout) -> tuple[list[Any], list[Any]]:
    prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
    return prompts, [completion.token_ids.tolist() for completion in scored.rollout.completions]


@pytest.mark.full
def test_two_teachers_of_a_mixture(tmp_path: Path) -> None:
    """One teaches half of the prompts. At ratio 1 the loss is minus the mean advantage, which is the distance."""
    mesh, names = make_mesh(1), ("a", "b")
    teachers = [
        {"path": "x", "label": "a", "weight": 0.5},
        {"path": "y", "label": "b", "weight": 2.0, "only_if": "hard"},
    ]
    config = config_of(tmp_path, teachers)
    learner = make_learner(config, mesh, teachers=given(7, 8, offload=True))
    scored = with_columns(make_scored(make_model(mesh), config), "hard", [1, 0, 1, 0])
    rows = rows_of(scored)
    own = model_logps(make_model(mesh), *rows)
    gaps = {
        name: [mine - its for mine, its in zip(own, model_logps(make_model(mesh, seed), *rows), strict=True)]
        for name, seed in zip(names, (7, 8), strict=True)
    }
    taught = [gap for row, gap in enumerate(gaps["b"]) if row // 2 in (0, 2)]
    distances = {"a": np.concatenate(gaps["a"]).mean(), "b": np.concatenate(taught).mean()}
    tokens = sum(map(len, own))
    loss = (0.5 * np.concatenate(gaps["a"]).sum() + 2.0 * np.concatenate(taught).sum()) / tokens
    metrics = learner.update(scored).metrics
    assert metrics["update/loss"] == pytest.approx(loss, abs=2e-5)
    for name in names:
        assert metrics[f"teachers/{name}/kl"] == pytest.approx(distances[name], abs=1e-5)
    first = np.mean([gap[0] for gap in gaps["a"]])  # of five places, the first quarter is the first token
    assert metrics["teachers/a/kl_quarter_1"] == pytest.approx(first, abs=1e-5)
    assert "groups/informative_fraction" not in metrics


@pytest.mark.full
def test_the_likeliest_tokens_of_a_teacher(tmp_path: Path) -> None:
    """The loss is the mean of divergences over all bins, from logits of NumPy's; the gradient moves towards zero."""
    mesh = make_mesh(1)
    config = config_of(tmp_path, [{"path": "x", "label": "a"}], name="gkd", options={"mix": 1.0, "top_k": VOCAB})
    learner = make_learner(config, mesh, teachers=given(7))
    scored = make_scored(make_model(mesh), config)
    rows = rows_of(scored)

    def distributions(seed: int) -> np.ndarray:
        whole = [
            [(prompt, [*completion[:place], token]) for token in range(VOCAB)]
            for prompt, completion in zip(*rows, strict=True)
            for place in range(len(completion))
        ]
        flat = [pair for each in whole for pair in each]
        found = model_logps(make_model(mesh, seed), [prompt for prompt, _ in flat], [line for _, line in flat])
        return np.array([line[-1] for line in found]).reshape(len(whole), VOCAB)

    q, p = distributions(0), distributions(7)
    expected = (np.exp(q) * (q - p)).sum(axis=1).mean()
    assert learner.update(scored).metrics["update/loss"] == pytest.approx(expected, rel=2e-5)


@pytest.mark.full
def test_a_teacher_beside_rewards_adds_to_their_advantages(tmp_path: Path) -> None:
    """The gradient is the sum of both: the surrogate is linear in the advantages at ratio 1."""
    mesh = make_mesh(1)
    section = {"loss_aggregation": "token-mean"}
    gradients = {}
    for name, teachers in (("grpo", [{"path": "x", "label": "a"}]), ("distill", [{"path": "x", "label": "a"}])):
        config = config_of(tmp_path / name, teachers, name=name, **section)
        learner = make_learner(config, mesh, teachers=given(7))
        scored = make_scored(make_model(mesh), config)
        gradients[name] = learner.gradients(scored)
    config = config_of(tmp_path / "alone", [{"path": "x", "label": "a", "weight": 0.0}], name="grpo", **section)
    learner = make_learner(config, mesh, teachers=given(7))
    alone = learner.gradients(make_scored(make_model(mesh), config))
    for name, both in gradients["grpo"].items():
        np.testing.assert_allclose(both, alone[name] + gradients["distill"][name], atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize(("fsdp", "name"), [(1, "distill"), (2, "gkd")])
def test_a_teacher_on_the_samplers_devices_says_the_same_to_the_bit(tmp_path: Path, fsdp: int, name: str) -> None:
    """Meshes of equal size run one program; it is kept in the host's memory in one of the two runs."""
    own = Mesh(np.array(jax.devices()[2 : 2 + fsdp]).reshape(fsdp, 1), ("fsdp", "tp"))
    options, found = {"options": {"top_k": 5}} if name == "gkd" else {}, []
    for place, mesh in (("trainer", None), ("sampler", own)):
        teachers = [{"path": "x", "label": "a", "mesh": place}]
        config = config_of(tmp_path / place, teachers, name=name, layout="split", **options)
        frozen = FrozenModel(make_model(mesh or make_mesh(fsdp), 7), offload=place == "sampler")
        learner = make_learner(config, make_mesh(fsdp), teachers=(TeacherInputs(frozen, None, mesh),))
        metrics = learner.update(make_scored(make_model(make_mesh(1)), config)).metrics
        found.append(({n: v for n, v in metrics.items() if n != "teachers/seconds"}, learner.params_digest()))
    assert found[0] == found[1]
    assert found[0][0]["teachers/a/kl"] > 0.01


@pytest.mark.full
def test_a_teacher_that_is_not_finite_is_named(tmp_path: Path) -> None:
    mesh = make_mesh(1)
    config = config_of(tmp_path, [{"path": "x", "label": "a"}])
    teachers = given(7)
    assert teachers[0].model is not None
    broken = teachers[0].model.model
    nnx.update(broken, jax.tree.map(lambda leaf: leaf * np.nan, nnx.state(broken)))
    learner = make_learner(config, mesh, teachers=teachers)
    before = flat_params(learner)
    with pytest.raises(NonFiniteError, match=r"the log-probability of token 0 in row 0 by the teacher a is nan"):
        learner.update(make_scored(make_model(mesh), config))
    assert all((before[name] == value).all() for name, value in flat_params(learner).items())


@pytest.mark.full
def test_a_moving_average_follows_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The teacher is the policy of the start, and after every step a quarter of the way nearer to the policy."""
    mesh, config = make_mesh(1), config_of(tmp_path, [{"update_rate": 0.25, "hint": "x"}])
    hinted = (TeacherInputs(None, lambda prompts: [(9, *prompt.token_ids)[:6] for prompt in prompts]),)
    learner = make_learner(config, mesh, teachers=hinted)
    start = flat_params(learner)
    scored = [make_scored(make_model(mesh), config, step) for step in (1, 2)]
    learner.update(scored[0])
    average = by_name(nnx.state(learner._parts.teachers.teachers[0].frozen.model))
    for name, value in flat_params(learner).items():
        np.testing.assert_allclose(average[name], 0.75 * start[name] + 0.25 * value, atol=1e-6)
    learner.save(1)
    metrics = learner.update(scored[1]).metrics
    learner.close()
    other = make_learner(config, mesh, seed=3, teachers=hinted)
    assert other.restored_step == 1
    again = other.update(scored[1]).metrics
    assert {n: v for n, v in again.items() if n != "teachers/seconds"} == {
        n: v for n, v in metrics.items() if n != "teachers/seconds"
    }
    assert other.params_digest() == learner.params_digest()
    other.close()


# --- hints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "hinted", "of_later_turn", "seen"),
    [
        ((1, 2, 7, 8), (1, 2, 3, 4, 7, 8), (1, 2, 7, 8, 5, 6), (1, 2, 3, 4, 7, 8, 5, 6)),
        ((7, 8), (3, 4, 7, 8), (7, 8, 5), (3, 4, 7, 8, 5)),
        ((1, 2, 7), (1, 9, 7), (1, 2, 7, 5), (1, 9, 7, 5)),  # the system message is another one
        ((1, 1, 7), (1, 1, 1, 7), (1, 1, 7, 7), (1, 1, 1, 7, 7)),  # where it is does not matter
    ],
)
def test_a_hint_has_its_place_in_every_turn(plain: Any, hinted: Any, of_later_turn: Any, seen: Any) -> None:
    change = Insertion.between(plain, hinted)
    assert change.made_in(plain, 0) == hinted
    assert change.made_in(of_later_turn, 0) == seen


def test_a_turn_that_begins_otherwise_has_no_place_for_a_hint() -> None:
    with pytest.raises(DataError, match="got another beginning in row 3"):
        Insertion.between((1, 2, 7), (1, 2, 3, 7)).made_in((1, 7), 3)


@pytest.mark.full
def test_a_hint_changes_what_the_teacher_says_and_not_what_is_learnt_from(tmp_path: Path) -> None:
    mesh, config = make_mesh(1), config_of(tmp_path, [{"hint": "x", "max_prompt_tokens": 9}])
    seen = lambda prompts: [(*prompt.token_ids[:1], 30, 31, 32, *prompt.token_ids[1:]) for prompt in prompts]  # noqa: E731
    learner = make_learner(config, mesh, teachers=(TeacherInputs(None, seen),))
    scored = make_scored(make_model(mesh), config)
    scored = with_completion(scored, 1, sampled=np.array([True] + [False] * (len(_ids(scored, 1)) - 1)))
    prompts, completions = rows_of(scored)
    teacher = learner._parts.teachers.teachers[0]
    hinted, _ = teacher.prompts(scored, range(len(prompts)))
    assert hinted[2] == (*prompts[2][:1], 30, 31, 32, *prompts[2][1:])
    taught = learner.taught(scored)
    # a row of NumPy's forward pass is 11 tokens long, which the longest prompt with its hint exceeds
    short = [row for row in range(len(prompts)) if len(hinted[row]) + len(completions[row]) <= 11 and row != 1]
    wanted = model_logps(make_model(mesh), [hinted[row] for row in short], [completions[row] for row in short])
    for row, line in zip(short, wanted, strict=True):
        np.testing.assert_allclose(taught.known["teacher_logps"][row, : len(line)], line, atol=1e-5)
    assert len(short) > 2
    assert taught.known["teacher_weights"][1].tolist() == [1, 0, 0, 0, 0]  # the others are observations
    with pytest.raises(DataError, match="at most 9 tokens, got 16; raise max_prompt_tokens of the teacher"):
        replace(teacher, hinted=lambda _: [tuple(range(16))] * 4).prompts(scored, [0])


def _ids(scored: ScoredRollout, row: int) -> Any:
    return scored.rollout.completions[row].token_ids
