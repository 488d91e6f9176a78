"""Checks a run without generating a token, for ``--dry-run``."""

from collections.abc import Sequence
from typing import Any, cast

from tpu_grpo.algorithms import notices
from tpu_grpo.algorithms.formula import objective_line
from tpu_grpo.engine.load_balancing import divided_places
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.lora import read_adapters
from tpu_grpo.models.tokenizers import padding_notes
from tpu_grpo.observe.callbacks import find_callbacks
from tpu_grpo.run.abstract import AbstractRun, open_abstract_checkpoint, open_abstract_teachers
from tpu_grpo.run.inputs import Inputs, check_model
from tpu_grpo.run.meshes import build_meshes, check_trainer
from tpu_grpo.run.parts import open_run_algorithm, open_task


def check(inputs: Inputs, devices: Sequence[Any] | None = None) -> list[str]:
    """Check everything that can be checked without sampling a token, and return the findings as lines of text.

    ``devices`` are the run's devices; if None, the devices of all hosts.

    Raises:
        TpuGrpoError: for the first problem found.
    """
    config = inputs.config
    algorithm = open_run_algorithm(config.algorithm, config.data, config.optimizer)
    find_callbacks(config.logging.callbacks)
    with (
        open_abstract_checkpoint(config.model, inputs.checkpoint) as checkpoint,
        open_abstract_teachers(config.teachers, config.model.dtype, inputs.teachers) as teachers,
    ):
        check_model(config, checkpoint)
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint, devices)
        check_trainer(config.algorithm, checkpoint, meshes)
        stop = [cast(int, inputs.tokenizer.eos_token_id)]
        run = AbstractRun(config, checkpoint, meshes, stop, algorithm=algorithm, teachers=teachers)
        task, options = open_task(inputs, algorithm, Hosts()), run.options
        _ = run.learner  # builds optimizer, schedule and loss from array specs
        if config.model.lora.path is not None:
            read_adapters(run.policy, config.model.lora, checkpoint)
        if task.environments is not None:
            divided_places(task.environments.places, [(0,)] * meshes.replicas)
        origin = ", built in, taught on first use" if config.model.builtin is not None else ""
        held_out = "none" if task.held_out is None else f"{len(task.held_out.prompts)} prompts"
        moved, *kinds = run.sync.describe()
        objective = f"Tunix's, of {algorithm.objective}"
        if config.algorithm.tunix is None:
            objective = objective_line(config.algorithm, config.rollout, algorithm, config.teachers)
        epoch = task.prompts.size / config.data.prompts_per_step
        return [
            f"model      {config.model.path}: {checkpoint.family.model_type}, {checkpoint.parameter_count:,} "
            f"parameters{origin}",
            f"meshes     trainer {dict(meshes.trainer.shape)}, sampler {meshes.replicas} x tensor {meshes.tensor}",
            *(
                f"data       {p.name}: {len(p.rendered.prompts)} prompts, {p.rendered.dropped} dropped as too long"
                for p in task.prompts.parts
            ),
            *(f"episodes   {line}" for line in (task.environments.describe() if task.environments else [])),
            f"rewards    {', '.join(inputs.rewards.names) or 'none'}",
            *(
                f"teacher    {spec.shown}: {'the policy of the start' if model is None else model.family.model_type}, "
                f"weight {spec.weight:g}"
                for spec, model in zip(config.teachers, teachers, strict=True)
            ),
            f"algorithm  {config.algorithm.name}, {algorithm.aggregation}",
            f"objective  {objective}",
            *(f"note       {note}" for note in (*checkpoint.notes, *padding_notes(inputs.tokenizer))),
            *(f"note       {notice}" for notice in (*notices(config.algorithm, config.rollout), *inputs.teacher_notes)),
            *(
                f"note       {p.name}: prompts end with <think>, which think_answer and xml_count count as written, "
                "and rewards of answers read what follows </think>"
                for p in task.prompts.parts
                if p.rendered.prompts[0].text.rstrip().endswith("<think>")
            ),
            f"evaluation {held_out}",
            f"trainer    {meshes.attention}",
            f"rollout    {options.attention} attention, {options.cache_tokens} cache tokens, shapes {options.shapes}",
            f"step       {config.step_text}",
            f"run        {config.run.max_steps} steps; an epoch of {task.prompts.size} prompts has {epoch:.1f}",
            f"sync       {moved}",
            *kinds,
        ]
