"""Opens the teachers of a run: their models, what their tokenizers share with the policy's, and prompts with hints.

read = read_teachers(config.teachers, config.model, config.data, config.rollout)  # files only
notes = check_teachers(config.teachers, read, tokenizer, columns, data=config.data, beta=config.algorithm.beta)
given = teacher_inputs(config.teachers, dtype, checkpoints, meshes, renderer)   # onto the trainer's devices
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from tpu_grpo.config import DataSection, ModelSection, RolloutSection, TeacherSpec
from tpu_grpo.data.chat_messages import Template
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.learner import FrozenModel, TeacherInputs
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.tunix_model import abstract_model, check_finite, load_model
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.inputs import check_context, open_tokenizer, read_model
from tpu_grpo.run.meshes import Meshes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Read = tuple[Checkpoint | None, ...]
"""The checkpoint of each teacher; None for a built-in one, or the policy of the start."""


def read_teachers(
    teachers: Sequence[TeacherSpec], policy: ModelSection, data: DataSection, rollout: RolloutSection
) -> Read:
    """Check from file headers that the teachers' models are complete and supported, and can read the run's sequences;
    raises as `read_model` and `check_context` do."""
    found = list[Checkpoint | None]()
    for spec in teachers:
        model = spec.as_model(policy.dtype)
        checkpoint = None if model is None else read_model(model)
        if checkpoint is not None:
            check_context(checkpoint, spec.max_prompt_tokens or data.max_prompt_tokens, rollout.max_new_tokens)
        found.append(checkpoint)
    return tuple(found)


def check_teachers(
    teachers: Sequence[TeacherSpec],
    read: Read,
    tokenizer: "PreTrainedTokenizerFast",
    columns: Collection[str],
    *,
    data: DataSection,
    beta: float,
) -> tuple[str, ...]:
    """Check tokenizers, columns and hints of the teachers, and return notes for the user.

    Raises:
        ConfigError: for another tokenizer, or a column of only_if or of a hint that the data lacks.
    """
    notes: list[str] = []
    for spec, checkpoint in zip(teachers, read, strict=True):
        asked = ([] if spec.only_if is None else [("only_if", spec.only_if)]) + [
            ("hint", name) for name in hint_of(spec).fields
        ]
        for setting, column in asked:
            if column not in columns:
                raise ConfigError(
                    f"{setting} of the teacher {spec.shown} needs the column {column!r} of the data, which has "
                    f"{', '.join(columns)}; correct it, or map a column with data.columns"
                )
        if (model := spec.as_model()) is not None:
            other = open_tokenizer(model, checkpoint)
            compare_tokenizers(tokenizer, other, spec.shown)
            if data.chat_template and other.chat_template != tokenizer.chat_template:
                notes.append(
                    f"the chat template of the teacher {spec.shown} is not the policy's, whose prompts it will see; it "
                    "may judge worse than it could: give the policy's tokenizer_config.json the template that the "
                    "teacher knows, if the policy knows neither"
                )
    if teachers and beta:
        notes.append(
            f"algorithm.beta={beta:g} beside teachers: the penalty draws the policy to where it "
            "began, and the teachers to themselves; both hold, with their weights"
        )
    return tuple(notes)


def compare_tokenizers(policy: "PreTrainedTokenizerFast", teacher: "PreTrainedTokenizerFast", name: str) -> None:
    """Raise ConfigError for the first id that the two tokenizers give different tokens. Further tokens of the teacher
    do not matter, because the policy never samples them."""
    own, other = ({index: token for token, index in each.get_vocab().items()} for each in (policy, teacher))
    for index in sorted(own):
        if other.get(index) != own[index]:
            found = f"{other[index]!r}" if index in other else "none"
            raise ConfigError(
                f"the teacher {name} must have the policy's tokenizer, token by token; id {index} is {own[index]!r} to "
                f"the policy, and {found} to the teacher, the first of "
                f"{sum(other.get(each) != token for each, token in own.items())} such ids; take a teacher of the same "
                "family"
            )


def hint_of(spec: TeacherSpec) -> Template:
    """Return the template of a teacher's hint; raises ConfigError if it is malformed."""
    return Template(spec.hint, f"hint of the teacher {spec.shown}")


def teacher_inputs(
    teachers: Sequence[TeacherSpec],
    dtype: str,
    checkpoints: Read,
    meshes: Meshes,
    renderer: Callable[[], PromptRenderer] | None = None,
) -> tuple[TeacherInputs, ...]:
    """Load the teachers onto their meshes, each in its own sharding; hosts without devices there get abstract ones.

    They compute in ``dtype``, unless they have their own. ``checkpoints`` has None for the policy of the start.
    ``renderer()`` makes a renderer of the run's prompts; without it, nothing is loaded, and all hosts get abstract
    ones. Raises ConfigError for a mesh that does not fit a teacher, and CheckpointError for weights that are not
    finite.
    """
    given = list[TeacherInputs]()
    for spec, checkpoint in zip(teachers, checkpoints, strict=True):
        frozen, hinted, mesh = None, None, meshes.of_sampler if spec.mesh == "sampler" else None
        if checkpoint is not None:
            make = abstract_model if renderer is None else load_model
            own = jnp.dtype(spec.dtype or dtype)
            on = mesh or meshes.trainer
            model = make(checkpoint, on, dtype=own, remat="none", flash_block=meshes.flash_block)
            check_finite(model, checkpoint.directory)
            frozen = FrozenModel(model, offload=spec.offload)
        if spec.hint and renderer is not None:
            hinted = partial(renderer().hinted, hint=hint_of(spec))
        given.append(TeacherInputs(frozen, hinted, mesh))
    return tuple(given)
