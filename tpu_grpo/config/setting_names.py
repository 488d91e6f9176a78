"""The settings there are: name, type, default and meaning of each, and what changing it does to a run that goes on.

An effect is decided here for every setting; a new one is given its effect, or a test fails.

    none        nothing that is learnt or measured depends on it
    rounding    the same is computed in another order: results compare, but not to the bit
    results     before and after cannot be compared; needs ``checkpoint.allow_changes``
"""

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from tpu_grpo.config.section import Section

Effect = Literal["none", "rounding", "results"]

_NONE = """
run.name run.dir run.max_steps run.compilation_cache
rollout.release_during_update
rewards[i].workers rewards[i].early rewards[i].timeout rewards[i].recycle rewards[i].memory_gb rewards[i].deterministic
environment.timeout environment.memory_gb environment.recycle
meshes.sync_temporary_mib meshes.probe_every meshes.probe_bound
hosts.coordinator hosts.index hosts.check hosts.start_timeout_seconds hosts.lost_timeout_seconds
checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.resume checkpoint.allow_changes
evaluation.every evaluation.k evaluation.best
update.on_non_finite update.max_skipped
export.every export.kind export.dtype export.shard_mib
logging.samples_every logging.tensorboard logging.wandb logging.wandb_project logging.profile_steps logging.on_end
"""
_ROUNDING = """
model.attention model.remat
rollout.attention rollout.experts rollout.max_running_requests rollout.kv_tokens rollout.page_size
rollout.prefill_tokens rollout.prefix_cache rollout.batch_paddings rollout.steps_per_launch
environment.workers environment.tool_steps
algorithm.row_tokens algorithm.micro_batch_prompts
meshes.layout meshes.trainer.fsdp meshes.trainer.tp meshes.sampler.tensor meshes.sampler.shard_vocab
hosts.count
"""
_RESULTS = """
run.seed
model.path model.pad_token model.dtype model.param_dtype model.train_layers
model.lora.rank model.lora.alpha model.lora.targets model.lora.layers model.lora.path
data.path data.split data.subset data.options data.columns data.sources
data.sources[i].split data.sources[i].subset data.sources[i].options data.sources[i].columns data.sources[i].path
data.sources[i].weight data.sources[i].name data.sources[i].prompt_template
data.prompt_template data.messages data.final_assistant data.system_prompt data.examples data.example_template
data.chat_template data.thinking data.date data.prompts_per_step data.max_prompt_tokens data.too_long data.shuffle
data.curriculum
data.dynamic.extra data.dynamic.rounds data.pools.edges data.pools.weights data.retire.at data.retire.times
data.pass_rate
rollout.temperature rollout.top_k rollout.top_p rollout.min_p rollout.max_new_tokens rollout.kv_dtype
environment.name environment.options environment.max_turns environment.max_turn_tokens
environment.max_observation_tokens environment.tool_format environment.on_error environment.error_value
environment.turn_credit
rewards rewards[i].name rewards[i].label rewards[i].weight rewards[i].options rewards[i].only_if rewards[i].on_error
rewards[i].error_value rewards[i].messages
algorithm.preset algorithm.name algorithm.options algorithm.group_size algorithm.beta algorithm.iterations
algorithm.mini_batch_prompts algorithm.old_policy algorithm.importance_cap algorithm.importance_floor
algorithm.correction algorithm.correction_mode algorithm.veto_low algorithm.veto_high algorithm.opsm
algorithm.filtered_ratio algorithm.routing_replay algorithm.clip_low algorithm.clip_high algorithm.dual_clip
algorithm.delta algorithm.advantage algorithm.loss_aggregation algorithm.kl_estimator algorithm.kl_in
algorithm.kl_unbiased algorithm.entropy_bonus algorithm.entropy_target algorithm.entropy_step
algorithm.reference_reset_every algorithm.drop_uninformative algorithm.truncated
optimizer.name optimizer.options optimizer.state optimizer.learning_rate optimizer.schedule optimizer.warmup_steps
optimizer.decay_steps optimizer.b1 optimizer.b2 optimizer.weight_decay optimizer.max_grad_norm optimizer.rules
optimizer.rules[i].match optimizer.rules[i].weight_decay optimizer.rules[i].learning_rate
evaluation.path evaluation.split evaluation.subset evaluation.options evaluation.columns evaluation.prompt_template
evaluation.prompts evaluation.samples evaluation.temperature evaluation.correct_from evaluation.answer_pattern
evaluation.rewards
"""
EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(_NONE.split(), "none"),
    **dict.fromkeys(_ROUNDING.split(), "rounding"),
    **dict.fromkeys(_RESULTS.split(), "results"),
}
"""Name -> effect, by the names that ``--help`` lists. A learning rate that falls towards the end depends on
``run.max_steps``, too; see `effect_of`."""


def effect_of(name: str, schedule: str) -> Effect:
    """Return the effect of a setting; entries of lists are named by their numbers, as in rewards.0.weight.

    Args:
        name: the setting.
        schedule: ``optimizer.schedule``.
    """
    if name == "run.max_steps" and schedule != "constant":
        return "results"
    return EFFECTS[listed_name(name)]


def listed_name(name: str) -> str:
    """Name a setting as ``--help`` lists it: rewards[i].weight for evaluation.rewards.0.weight."""
    numbered = re.sub(r"\.\d+(?=\.|$)", "[i]", name)
    return numbered.removeprefix("evaluation.") if numbered.startswith("evaluation.rewards[i].") else numbered


def check_names(names: Sequence[str]) -> None:
    """See that names are settings or sections of the config.

    Raises:
        ValueError: for one that is not, with the nearest that is.
    """
    parts = [name.split(".") for name in EFFECTS]
    sections = {".".join(part[:count]) for part in parts for count in range(1, len(part))}
    for name in names:
        if (listed := listed_name(name)) not in EFFECTS and listed not in sections:
            near = difflib.get_close_matches(listed, [*EFFECTS, *sections], n=1, cutoff=0.5)
            raise ValueError(
                f"must name settings or sections, such as optimizer.learning_rate or rewards, got {name!r}"
                + (f"; did you mean {near[0]}?" if near else "; `--help` lists every setting")
            )


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield every setting of a section as (name, type, default, meaning), in the order of its fields."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from settings_of(kind, f"{prefix}{name}.")
        elif entry := _entry_of(kind):
            default = "unset" if info.default is None else str([e.name for e in info.default])
            yield prefix + name, "list", default, info.description or ""
            if f"{prefix}{name}" != "evaluation.rewards":  # they are described once, in rewards[i]
                yield from settings_of(entry, f"{prefix}{name}[i].")
        else:
            default = "required" if info.is_required() else _yaml_scalar(info.get_default())
            yield prefix + name, _type_name(kind), default, " ".join((info.description or "").split())


def _entry_of(kind: Any) -> type[Section] | None:
    """Return the section that a list holds: RewardSpec of ``tuple[RewardSpec, ...]``, also of that or None."""
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
