"""Lists all settings with name, type, default and meaning, and the effect of a change on a run that is continued.

none        results do not depend on the setting
rounding    only the order of computation changes: results are comparable, but not bit by bit
results     earlier and later results cannot be compared; needs ``checkpoint.allow_changes``
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from tpu_grpo.config.plugins import did_you_mean
from tpu_grpo.config.section import Section

EVERYTHING = "all"
"""The entry of checkpoint.allow_changes that allows every change."""
ARRAYS = ("model.dtype", "model.param_dtype", "model.train_layers", "model.lora", "optimizer.name", "optimizer.state")
"""Settings that decide which arrays a checkpoint holds; no run goes on after one that was saved with other arrays."""
Effect = Literal["none", "rounding", "results"]

_NONE = """
run.name run.dir run.max_steps run.epochs
rollout.release_during_update
rewards[i].workers rewards[i].early rewards[i].timeout rewards[i].recycle rewards[i].memory_gb rewards[i].deterministic
rewards[i].secrets
environment.timeout environment.memory_gb environment.recycle environment.secrets
meshes.sync_temporary_mib meshes.probe_every meshes.probe_bound
evaluation.every evaluation.best
hosts.coordinator hosts.index hosts.check hosts.start_timeout_seconds hosts.lost_timeout_seconds
checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.resume checkpoint.allow_changes
update.on_non_finite
export.every export.kind export.dtype export.shard_mib
logging.samples_every logging.report logging.tensorboard logging.wandb logging.wandb_project logging.wandb_entity
logging.wandb_group logging.histograms_every logging.callbacks logging.against logging.profile_steps
"""
_ROUNDING = """
model.attention model.remat
rollout.attention rollout.max_running_requests rollout.kv_tokens rollout.page_size
rollout.prefill_tokens rollout.prefix_cache rollout.batch_paddings rollout.steps_per_launch
environment.workers environment.tool_steps
algorithm.row_tokens algorithm.micro_batch_prompts
teachers[i].mesh teachers[i].offload
meshes.slices meshes.layout meshes.trainer meshes.sampler
hosts.count
"""
_RESULTS = """
run.seed
model.path model.dtype model.param_dtype model.train_layers model.lora
rollout.temperature rollout.top_k rollout.top_p rollout.min_p rollout.max_new_tokens rollout.kv_dtype
rollout.weights_dtype rollout.partial_extra rollout.partial_steps
environment.name environment.options environment.max_turns environment.max_turn_tokens
environment.max_observation_tokens environment.tool_format environment.on_error environment.error_value
environment.turn_credit
rewards rewards[i].name rewards[i].label rewards[i].weight rewards[i].options rewards[i].only_if rewards[i].on_error
rewards[i].error_value rewards[i].messages
evaluation.path evaluation.split evaluation.subset evaluation.options evaluation.columns evaluation.prompt_template
evaluation.prompts evaluation.samples evaluation.temperature evaluation.rewards
teachers teachers[i].path teachers[i].label teachers[i].weight teachers[i].only_if teachers[i].hint
teachers[i].max_prompt_tokens teachers[i].update_rate teachers[i].dtype
data algorithm optimizer
"""
EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(_NONE.split(), "none"),
    **dict.fromkeys(_ROUNDING.split(), "rounding"),
    **dict.fromkeys(_RESULTS.split(), "results"),
}
"""Setting -> effect, by the names in ``--help``; a section's entry is for its settings that have no entry. No section
has the effect none, so that somebody must decide about each new setting.

``run.max_steps`` has another effect if the learning rate falls towards the end; see `effect_of`.
"""


def effect_of(name: str, *, rate_ends_with_run: bool) -> Effect:
    """Return the effect of a setting; entries of lists are numbered, as in rewards.0.weight.

    ``rate_ends_with_run`` says whether the learning rate depends on the last step of the run.

    Raises:
        KeyError: EFFECTS has no entry for the setting or its sections.
    """
    if name == "run.max_steps" and rate_ends_with_run:
        return "results"
    listed = listed_name(name)
    while listed not in EFFECTS and "." in listed:
        listed = listed.rpartition(".")[0]
    return EFFECTS[listed]


def listed_name(name: str) -> str:
    """Name a setting as ``--help`` lists it: rewards[i].weight for evaluation.rewards.0.weight."""
    numbered = re.sub(r"\.\d+(?=\.|$)", "[i]", name)
    return numbered.removeprefix("evaluation.") if numbered.startswith("evaluation.rewards[i]") else numbered


COMMON = """
run.name run.max_steps run.epochs run.seed
model.path model.dtype model.lora.rank
data.path data.prompts_per_step data.max_prompt_tokens data.prompt_template
rollout.max_new_tokens rollout.temperature
environment.name
rewards
algorithm.name algorithm.group_size algorithm.beta
optimizer.learning_rate
meshes.layout
checkpoint.every
evaluation.path evaluation.every
logging.wandb
""".split()  # noqa: SIM905  # one section per line
"""The settings that most people change, which ``--help`` shows, in the order of the sections."""
_ELSEWHERE = """
algorithm.group_size: num_generations num_return_sequences num_samples_per_prompt n_samples_per_prompt rollout_n n
algorithm.drop_uninformative: ensure_scores_are_not_same
rollout.max_new_tokens: max_completion_length max_response_length max_tokens max_token_length response_length
rollout.max_new_tokens: total_generation_steps
data.max_prompt_tokens: max_prompt_length max_input_length prompt_length
data.prompts_per_step: per_device_train_batch_size train_batch_size batch_size total_batch_size global_batch_size
data.prompts_per_step: rollout_batch_size generation_batch_size
algorithm.micro_batch_prompts: gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu
algorithm.mini_batch_prompts: ppo_mini_batch_size mini_batch_size steps_per_generation
algorithm.iterations: num_iterations ppo_epochs num_ppo_epochs
algorithm.beta: kl_coef kl_loss_coef kl_coeff kl_beta init_kl_coef
algorithm.clip_low: epsilon clip_ratio cliprange clip_range eps_clip clip_ratio_low
algorithm.clip_high: epsilon_high clip_ratio_high eps_clip_high
algorithm.advantage: scale_rewards adv_estimator
algorithm.loss_aggregation: loss_agg_mode
algorithm.name: loss_type importance_sampling_level trainer_type
algorithm.dual_clip: clip_ratio_c
algorithm.importance_cap: vllm_importance_sampling_clip_max vllm_importance_sampling_cap
algorithm.correction: vllm_importance_sampling_mode vllm_importance_sampling_correction
algorithm.entropy_bonus: entropy_coef entropy_coeff
algorithm.kl_estimator: kl_loss_type
algorithm.kl_in: use_kl_in_reward
algorithm.reference_reset_every: sync_ref_model ref_model_sync_steps
algorithm.truncated: mask_truncated_completions
optimizer.learning_rate: lr
optimizer.schedule: lr_scheduler_type lr_scheduler scheduler
optimizer.warmup_steps: lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps_ratio
optimizer.max_grad_norm: grad_clip clip_grad gradient_clipping
optimizer.b1: adam_beta1 beta1
optimizer.b2: adam_beta2 beta2
optimizer.name: optim
run.max_steps: max_training_steps total_training_steps num_steps num_training_steps total_steps steps num_train_steps
run.epochs: num_train_epochs total_epochs num_epochs
run.dir: output_dir save_dir save_directory default_local_dir
run.name: run_name experiment_name wandb_name
model.path: model model_name_or_path model_name model_id pretrained_model_name_or_path base_model
model.dtype: torch_dtype bf16 fp16 precision
model.remat: gradient_checkpointing enable_gradient_checkpointing
model.attention: attn_implementation
model.lora.rank: use_peft lora_r lora_rank peft_config
model.lora.targets: target_modules lora_target_modules
data.path: data dataset_name dataset train_dataset train_files data_files
data.system_prompt: system_message
evaluation.path: eval_dataset val_files validation_files test_files
evaluation.every: eval_steps test_freq eval_interval steps_per_eval
teachers: teacher_model_name_or_path teacher_model teacher_config teacher_prompts
rewards: reward_funcs reward_fn reward_functions reward_function custom_reward_function reward_weights
checkpoint.every: save_steps save_freq save_interval
checkpoint.keep: save_total_limit max_ckpt_to_keep
checkpoint.resume: resume_from_checkpoint resume_mode
logging.samples_every: log_completions
logging.wandb: use_wandb report_to log_with
logging.wandb_project: project_name
logging.wandb_group: wandb_group_name
rollout.kv_tokens: gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static
meshes.sampler.tensor: tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size
meshes.trainer.fsdp: fsdp_size fsdp
"""
"""Setting: its names in TRL, verl, EasyDeL and Atropos."""
MEANT: Mapping[str, str] = {
    name: setting
    for setting, _, names in (line.partition(":") for line in _ELSEWHERE.strip().splitlines())
    for name in names.split()
}
"""Last part of another library's setting name -> equivalent setting here."""
SAME_VALUES = {"bf16": "bfloat16", "fp32": "float32", "flash_attention_2": "flash", "sdpa": "dot", "eager": "dot"}
"""Value in other libraries -> value here."""
ABSENT = {
    "push_to_hub": "a run uploads nothing; after it, scripts/export.py --push OWNER/NAME does",
    "hub_model_id": "a run uploads nothing; after it, scripts/export.py --push OWNER/NAME does",
    "use_vllm": "the engine always runs in the process; leave it out",
    "vllm_mode": "the engine always runs in the process; leave it out",
    "config": "the config is named alone: scripts/run.py CONFIG.yaml",
    "logging_steps": "every step is logged; leave it out",
    **dict.fromkeys(
        ("dropout", "lora_dropout"),
        "leave it out: the engine samples from the policy without dropout, and a trainer with it would compute the "
        "ratio of another one; optimizer.weight_decay and algorithm.beta hold adapters back, too",
    ),
}
"""Setting in other libraries that is not needed here -> the reason."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return "did you mean NAME?" for the most similar of the names; None if none is similar."""
    return did_you_mean(listed_name(name), list(names)).rstrip() or None


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the setting that corresponds to a name in another library or another section; None if there is none.

    >>> meant("num_generations", []), meant("trainer.temperature", ["rollout.temperature", "rollout.top_p"])
    ('algorithm.group_size', 'rollout.temperature')
    """
    last = name.rpartition(".")[2].replace("-", "_")
    same = [known for known in names if known.rpartition(".")[2] == last and "[i]" not in known]
    return MEANT.get(last) or (same[0] if len(same) == 1 else None)


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield every setting of a section as (name, type, default, meaning), in the order of its fields."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from settings_of(kind, f"{prefix}{name}.")
        elif entry := _entry_of(kind):
            default = "unset" if info.default is None else str([e.name for e in info.default])
            yield prefix + name, "list", default, info.description or ""
            if f"{prefix}{name}" != "evaluation.rewards":  # described under rewards[i]
                yield from settings_of(entry, f"{prefix}{name}[i].")
        else:
            default = "required" if info.is_required() else _yaml_scalar(info.get_default())
            yield prefix + name, _type_name(kind), default, " ".join((info.description or "").split())


def _entry_of(kind: Any) -> type[Section] | None:
    """Return the section class of a list's entries: RewardSpec for ``tuple[RewardSpec, ...]``, with or without None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(filter(None, map(_entry_of, get_args(kind))), None)
    inside = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inside if isinstance(inside, type) and issubclass(inside, Section) else None


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join("unset" if a is type(None) else _type_name(a) for a in get_args(kind))
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    return getattr(kind, "__name__", str(kind)).lower() if not get_origin(kind) else "mapping"


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "unset"
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
