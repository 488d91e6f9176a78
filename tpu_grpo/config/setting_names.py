"""The settings there are: name, type, default and meaning of each, and what changing it does to a run that goes on.

none        nothing that is learnt or measured depends on it
rounding    the same is computed in another order: results compare, but not to the bit
results     before and after cannot be compared; needs ``checkpoint.allow_changes``
"""

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from tpu_grpo.config.section import Section

Effect = Literal["none", "rounding", "results"]

_NONE = """
run.name run.dir run.max_steps run.compilation_cache
rollout.release_during_update
rewards[i].workers rewards[i].early rewards[i].timeout rewards[i].recycle rewards[i].memory_gb rewards[i].deterministic
rewards[i].secrets
environment.timeout environment.memory_gb environment.recycle environment.secrets
meshes.sync_temporary_mib meshes.probe_every meshes.probe_bound
evaluation.every evaluation.k evaluation.best
hosts.coordinator hosts.index hosts.check hosts.start_timeout_seconds hosts.lost_timeout_seconds
checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.resume checkpoint.allow_changes
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
meshes.layout meshes.trainer meshes.sampler
hosts.count
"""
_RESULTS = """
run.seed
model.path model.pad_token model.dtype model.param_dtype model.train_layers model.lora
rollout.temperature rollout.top_k rollout.top_p rollout.min_p rollout.max_new_tokens rollout.kv_dtype
environment.name environment.options environment.max_turns environment.max_turn_tokens
environment.max_observation_tokens environment.tool_format environment.on_error environment.error_value
environment.turn_credit
rewards rewards[i].name rewards[i].label rewards[i].weight rewards[i].options rewards[i].only_if rewards[i].on_error
rewards[i].error_value rewards[i].messages
evaluation.path evaluation.split evaluation.subset evaluation.options evaluation.columns evaluation.prompt_template
evaluation.prompts evaluation.samples evaluation.temperature evaluation.correct_from evaluation.answer_pattern
evaluation.rewards
data algorithm optimizer
"""
EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(_NONE.split(), "none"),
    **dict.fromkeys(_ROUNDING.split(), "rounding"),
    **dict.fromkeys(_RESULTS.split(), "results"),
}
"""Setting -> effect, by the names that ``--help`` lists, or section -> effect of its settings that are not named; no
section is named whose settings have none, so that a new one of theirs is decided.

A test fails for a new setting without one. A learning rate that falls towards the end depends on ``run.max_steps``,
too; see `effect_of`.
"""


def effect_of(name: str, schedule: str) -> Effect:
    """Return the effect of a setting; entries of lists are named by their numbers, as in rewards.0.weight.

    Args:
        name: the setting.
        schedule: ``optimizer.schedule``.

    Raises:
        KeyError: nobody has decided what a change of it does.
    """
    if name == "run.max_steps" and schedule != "constant":
        return "results"
    listed = listed_name(name)
    while listed not in EFFECTS and "." in listed:
        listed = listed.rpartition(".")[0]
    return EFFECTS[listed]


def listed_name(name: str) -> str:
    """Name a setting as ``--help`` lists it: rewards[i].weight for evaluation.rewards.0.weight."""
    numbered = re.sub(r"\.\d+(?=\.|$)", "[i]", name)
    return numbered.removeprefix("evaluation.") if numbered.startswith("evaluation.rewards[i]") else numbered


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Ask for the one of the names that somebody may have meant; None if none is like it."""
    near = difflib.get_close_matches(listed_name(name), list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else None


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
