"""Teachers: what a step's completions are worth to other models, token by token (on-policy distillation).

    taught = teachers.read(scored, per_token, hosts)    # forward passes of all teachers
    taught.known                                        # arrays for the training rows, by field name in `TrainBatch`
    taught.metrics                                      # teachers/<name>/kl: the distance of the policy to each teacher
    teachers.follow(updater.stepped())                  # after the step's updates: moves the moving averages

A teacher with a hint sees other prompts than the policy, and the same completions: its log-probabilities belong to the
same token ids, wherever these lie in its rows. A hint changes a prompt in one place, and the same change is made in the
prompts of all turns of a conversation:

    prompt of the policy          [1 2 7 8]          of its second turn   [1 2 7 8 5 6 9]
    with the hint 3 4             [1 2 3 4 7 8]                           [1 2 3 4 7 8 5 6 9]

A teacher on the sampler's devices is the same model on another mesh, run by the same program; its hosts send what it
says to the trainer's. Prefill in an engine would need a cache, a weight layout and a sync of its own, and round
otherwise.

Suffixes: B rows of a step, T tokens of a completion, N teachers, K likeliest tokens of a teacher.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from tpu_grpo.config import TeacherSpec
from tpu_grpo.hosts import Hosts, hosts_of
from tpu_grpo.learner.batches import Batches
from tpu_grpo.learner.frozen import FrozenModel
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.parameters import Values, whole
from tpu_grpo.learner.rows import RowShape, sampled_mask
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion, Prompt, ScoredRollout

Hinted = Callable[[Sequence[Prompt]], Sequence[Sequence[int]]]
"""Returns the token ids of prompts with the hint that a teacher sees."""
PerTokenOf = Callable[..., dict[str, Any]]
"""`Learner._per_token`."""
QUARTERS = 4
"""The distance to a teacher is also measured in each quarter of ``rollout.max_new_tokens``."""


@dataclass(frozen=True)
class TeacherInputs:
    """A teacher's model and prompts."""

    model: FrozenModel | None
    """None for the policy as it was before the first step."""
    hinted: Hinted | None = None
    """None for a teacher that sees the policy's prompts."""
    mesh: Mesh | None = None
    """The model's mesh; None for the trainer's."""


@dataclass(frozen=True)
class Teacher:
    """A teacher, with the shape of its rows."""

    spec: TeacherSpec
    frozen: FrozenModel
    shape: RowShape
    batches: Batches
    """Puts rows on the teacher's mesh."""
    hinted: Hinted | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices that the teacher runs on."""
        return self.batches.settings.mesh

    @property
    def is_apart(self) -> bool:
        """Whether these are the sampler's devices."""
        return self.spec.mesh == "sampler"

    def prompts(self, scored: ScoredRollout, rows: Sequence[int]) -> tuple[list[Sequence[int]], list[Completion]]:
        """Return the prompts as the teacher sees them, and the completions, of some rows. Raises DataError for a prompt
        that is too long with the hint, or a turn whose prompt does not begin as its conversation does."""
        given, completions = scored.rollout.row_prompts, [scored.rollout.completions[row] for row in rows]
        plain: list[Sequence[int]] = [given[row].token_ids for row in rows]
        if self.hinted is None:
            return plain, completions
        batch, size = scored.rollout.batch.prompts, scored.rollout.group_size
        hinted, most = self.hinted(batch), self.shape.max_prompt_tokens
        if (longest := max(map(len, hinted))) > most:
            raise DataError(
                f"prompts with the hint of the teacher {self.spec.shown} must have at most {most} tokens, got "
                f"{longest}; raise max_prompt_tokens of the teacher, or shorten the hint"
            )
        changes = [Insertion.between(prompt.token_ids, ids) for prompt, ids in zip(batch, hinted, strict=True)]
        seen: list[Sequence[int]] = [
            changes[row // size].made_in(ids, row) for row, ids in zip(rows, plain, strict=True)
        ]
        pairs = zip(rows, completions, strict=True)
        return seen, [_with_hint(completion, changes[row // size], row) for row, completion in pairs]


@dataclass(frozen=True)
class Insertion:
    """The one place where two prompts differ."""

    before: Sequence[int]
    """The first prompt up to the end of what is replaced."""
    start: int
    """The number of tokens at the start that both have."""
    ids: Sequence[int]
    """What the second prompt has in the place of ``before[start:]``."""

    @classmethod
    def between(cls, plain: Sequence[int], hinted: Sequence[int]) -> "Insertion":
        """Find the difference of two prompts: for [1 2 7 8] and [1 2 3 4 7 8], 3 4 after two tokens."""
        most = min(len(plain), len(hinted))
        start = next((at for at in range(most) if plain[at] != hinted[at]), most)
        same = next((at for at in range(most - start) if plain[-1 - at] != hinted[-1 - at]), most - start)
        return cls(plain[: len(plain) - same], start, hinted[start : len(hinted) - same])

    def made_in(self, prompt: Sequence[int], row: int) -> tuple[int, ...]:
        """Make the same change in another prompt of the conversation; raises DataError if it begins otherwise."""
        end = len(self.before)
        if tuple(prompt[:end]) != tuple(self.before):
            raise DataError(
                f"every turn's prompt must begin as the conversation does, so that the teacher's hint has a place, got "
                f"another beginning in row {row}; use a chat template that keeps earlier messages, or no hint"
            )
        return (*prompt[: self.start], *self.ids, *prompt[end:])


def _with_hint(completion: Completion, change: Insertion, row: int) -> Completion:
    if (episode := completion.episode) is None:
        return completion
    branches = [replace(branch, prompt=change.made_in(branch.prompt, row)) for branch in episode.branches]
    return replace(completion, episode=replace(episode, branches=tuple(branches)))


@dataclass(frozen=True)
class TeacherReadings:
    """What the teachers say about the B completions of a step."""

    known: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays [B, T, ...] by field name in `TrainBatch`; empty without teachers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    broken: str = ""
    """The first log-probability of a teacher that is not finite, in words; "" if all are."""


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run."""

    teachers: tuple[Teacher, ...]
    shape: RowShape
    """The shape of the policy's rows. Its ``top_k`` is K, or 0 if the objective knows the sampled token only."""
    below: int
    """The ids of the likeliest tokens are below this, the rows of the policy's embedding."""

    def read(self, scored: ScoredRollout, per_token: PerTokenOf, hosts: Hosts) -> TeacherReadings:
        """Run all teachers on the completions of a step; every host must call this. A host without devices of the
        trainer reads only the teachers on the sampler's. Raises DataError for a hint that has no place."""
        if not self.teachers:
            return TeacherReadings()
        started, completions = time.perf_counter(), scored.rollout.completions
        shape_BT = len(completions), self.teachers[0].shape.max_new_tokens
        sampled_BT = np.zeros(shape_BT, np.bool_)
        for row, completion in enumerate(completions):
            sampled_BT[row, : len(completion.token_ids)] = sampled_mask(completion)
        known, metrics, broken = self.shape.of_teachers(shape_BT), dict[str, float](), ""
        for number, teacher in enumerate(self.teachers):
            spec, rows = teacher.spec, _taught_rows(teacher.spec, scored)
            if not rows or not (teacher.is_apart or teacher.mesh.local_devices):
                continue
            prompts, of_rows = teacher.prompts(scored, rows)
            with teacher.frozen.on_devices():
                found = per_token(prompts, of_rows, self._values_of(teacher, hosts), teacher.shape)
            own_BT, taught_BT = found["logprobs"], sampled_BT[rows]
            metrics |= _distances(spec.shown, of_rows, own_BT, taught_BT)
            broken = broken or _not_finite(spec.shown, rows, own_BT, taught_BT)
            if spec.weight and self.shape.top_k:
                known["teacher_weights"][rows, :, number] = spec.weight * taught_BT
                for name in ("ids", "top"):
                    known[f"teacher_{name}"][rows, :, number] = found[name]
            elif spec.weight:
                known["teacher_weights"][rows] += np.float32(spec.weight) * taught_BT
                known["teacher_logps"][rows] += np.float32(spec.weight) * own_BT
        metrics["teachers/seconds"] = time.perf_counter() - started
        return TeacherReadings(known, metrics, broken)

    def _values_of(self, teacher: Teacher, hosts: Hosts) -> Callable[[TrainBatch], dict[str, jax.Array]]:
        """Return the function of micro-batches that returns what a teacher says about their tokens."""

        def values(batch: TrainBatch) -> dict[str, jax.Array]:
            rows, forward = teacher.batches.placed_rows(batch), teacher.batches.settings.forward
            found = teacher.frozen.likeliest(rows, count=self.shape.top_k, below=self.below, **forward)
            return teacher.batches.sharded(found)

        def sent(batch: TrainBatch) -> dict[str, jax.Array]:
            shape, said = batch.weights.shape, values(batch) if teacher.mesh.local_devices else None
            nothing = {"logprobs": np.zeros(shape, np.float32)}
            if count := self.shape.top_k:
                nothing |= {"ids": np.zeros((*shape, count), np.int32)}
                nothing |= {"top": np.zeros((*shape, count + 1), np.float32)}
            sender, found = hosts_of(teacher.mesh.devices.flat)[0], dict[str, jax.Array]()
            for name, zeros in nothing.items():
                own = zeros if said is None else whole(said[name])
                found[name] = jnp.asarray(hosts.gather_array(f"{name} by {teacher.spec.shown}", own)[sender])
            return found

        return sent if teacher.is_apart else values

    def follow(self, stepped: Callable[[], Values]) -> None:
        """Move every moving average towards the policy, whose trained parameters ``stepped()`` returns by name."""
        for teacher in self.teachers:
            if teacher.spec.update_rate:
                teacher.frozen.follow(stepped(), teacher.spec.update_rate)


NO_TEACHERS: Any = Teachers((), None, 0)  # pyrefly: ignore[bad-argument-type]  # nothing is run


def _taught_rows(spec: TeacherSpec, scored: ScoredRollout) -> list[int]:
    """Return the rows that a teacher teaches, in which the policy sampled a token."""
    prompts, completions = scored.rollout.row_prompts, scored.rollout.completions
    return [
        row
        for row, completion in enumerate(completions)
        if completion.sampled_tokens and (spec.only_if is None or prompts[row].columns[spec.only_if])
    ]


def _distances(
    name: str,
    completions: Sequence[Completion],
    teacher_BT: Float[np.ndarray, "B T"],
    sampled_BT: Bool[np.ndarray, "B T"],
) -> dict[str, float]:
    """Estimate KL(policy || teacher) by the mean of log policy - log teacher over the sampled tokens, also in each
    quarter of the longest completion."""
    gaps_BT = np.zeros(teacher_BT.shape)
    for row, completion in enumerate(completions):
        count = len(completion.token_ids)
        gaps_BT[row, :count] = completion.logprobs - teacher_BT[row, :count].astype(np.float64)
    found, width = {f"teachers/{name}/kl": float(gaps_BT[sampled_BT].mean())}, teacher_BT.shape[1]
    for quarter in range(QUARTERS):
        places = slice(quarter * width // QUARTERS, (quarter + 1) * width // QUARTERS)
        if (of_quarter := sampled_BT[:, places]).any():
            found[f"teachers/{name}/kl_quarter_{quarter + 1}"] = float(gaps_BT[:, places][of_quarter].mean())
    return found


def _not_finite(
    name: str, rows: Sequence[int], teacher_BT: Float[np.ndarray, "B T"], sampled_BT: Bool[np.ndarray, "B T"]
) -> str:
    bad = np.argwhere(~np.isfinite(teacher_BT) & sampled_BT)
    if not len(bad):
        return ""
    row, token = bad[0].tolist()
    return f"the log-probability of token {token} in row {rows[row]} by the teacher {name} is {teacher_BT[row, token]}"
