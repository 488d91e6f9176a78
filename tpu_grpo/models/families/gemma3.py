"""The family of Gemma 3: its text models, and the text model of checkpoints that also see images.

It differs from Gemma 2 in this: queries and keys have norms, nothing is soft-capped, of six layers five have a window,
and the two kinds of layers rotate positions differently. Layers with a window have the base ``rope_local_base_freq``.
The others have ``rope_theta``, and in larger models they divide positions by 8. The head may be a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_grpo.models.families.decoder import DIVISIBLE, layer_leaf
from tpu_grpo.models.families.family import Family, SettingRule, null
from tpu_grpo.models.families.gemma2 import FULL, GEMMA_RULES, SLIDING, Gemma2Config, gemma_fields, gemma_leaves
from tpu_grpo.models.families.leaves import Leaf
from tpu_grpo.models.families.rope import LinearScaling, with_older_names


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The settings of Gemma 3; its soft caps are None."""

    rope_local_base_freq: float
    """The base of positions in layers with a window."""
    sliding_window_pattern: int

    @property
    def period(self) -> int:
        """See `Gemma2Config`."""
        return self.sliding_window_pattern

    @property
    def scaling(self) -> LinearScaling | None:
        """The scaling of positions in layers without a window."""
        factor = (self.rope_scaling or {}).get("factor")
        return None if factor is None else LinearScaling(factor)


# --- checkpoints ------------------------------------------------------------------------------------------------------

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "vision_tower.": None,
    "model.vision_tower.": None,
    "multi_modal_projector.": None,
    "model.multi_modal_projector.": None,
    "model.embed_vision.": None,
    "model.audio_tower.": None,
    "model.embed_audio.": None,
}
"""The first parts of tensors' names in checkpoints that also see images (transformers 4, then 5) or hear, and what the
text model's names have instead; None for parts that are left out."""
Settings = Callable[[Mapping[str, Any]], dict[str, Any]]
_OF_BOTH = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("torch_dtype", "dtype", "quantization_config", "transformers_version"),
)
"""The settings of a whole checkpoint that are also those of its text model."""


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a text model, from a config.json of ``model_type`` gemma3 or gemma3_text."""
    return text_of(settings, GEMMA3, "gemma3", _with_older_names)


def text_of(settings: Mapping[str, Any], family: Family, seeing: str, named: Settings) -> dict[str, Any]:
    """Return the settings of a text model of ``family``, from those of a config.json, under the names of ``named``.

    Of the ``model_type`` ``seeing``, which also sees images, they are those of ``text_config``, which leaves out what
    has transformers' values; these are added.
    """
    text = settings.get("text_config")
    if settings["model_type"] != seeing or not isinstance(text, Mapping):
        return named(settings)
    own = {name: settings[name] for name in _OF_BOTH if name in settings} | {"model_type": family.model_type}
    own["architectures"] = settings.get("architectures")
    if own["architectures"] == [family.architecture.replace("CausalLM", "ConditionalGeneration")]:
        own["architectures"] = [family.architecture]
    tied = {"tie_word_embeddings": settings.get("tie_word_embeddings", True)}
    return {**family.defaults, "max_position_embeddings": 131_072, **named({**tied, **text, **own})}


def _with_older_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename also what transformers 5 writes under ``rope_parameters`` for each kind of layer, unless it contradicts
    other settings or has another form."""
    match settings.get("rope_parameters"):
        case {
            "sliding_attention": {"rope_theta": local, "rope_type": "default", **local_rest},
            "full_attention": {"rope_theta": base, "rope_type": kind, **rest},
            **others,
        } if not (local_rest or others):
            scaling = None if kind == "default" and not rest else {"rope_type": kind, **rest}
            own = {"rope_local_base_freq": local, "rope_theta": base, "rope_scaling": scaling}
            if all(settings.get(name, value) in (value, None) for name, value in own.items()):
                return {name: value for name, value in settings.items() if name != "rope_parameters"} | own
    return with_older_names(settings)


def text_tensor(name: str) -> str | None:
    """See `Family.renamed`."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return None if own is None else own + name.removeprefix(prefix)
    return name


def _is_linear(value: Any) -> bool:
    """Whether a ``rope_scaling`` divides positions, or is null."""
    match value:
        case None:
            return True
        case {"factor": int() | float() as factor, **rest} if not isinstance(factor, bool):
            return 1 <= factor < 1e38 and rest in ({"rope_type": "linear"}, {"type": "linear"})
    return False


_NO_CAP = "neither Gemma 3 nor the sampler's model of it has soft caps: train a checkpoint without them"
_RULES = (
    null(
        "rope_parameters",
        f"it must hold, for {SLIDING} and {FULL}, a rope_theta and the rope_type default, or linear with a factor for "
        f"{FULL}, and none of them at the top level",
    ),
    *GEMMA_RULES,
    SettingRule(
        "rope_scaling",
        "null, or of rope_type linear with factor >= 1 and no other setting",
        _is_linear,
        "Gemma 3 has no other scaling: copy the model's own config.json again",
    ),
    null("attn_logit_softcapping", _NO_CAP),
    null("final_logit_softcapping", _NO_CAP),
)


# --- the model --------------------------------------------------------------------------------------------------------


def _leaves(config: Gemma3Config) -> tuple[Leaf, ...]:
    norms = (
        layer_leaf(f"attn.{own}.scale", f"self_attn.{name}.weight", (config.head_dim,))
        for own, name in (("_query_norm", "q_norm"), ("_key_norm", "k_norm"))
    )
    return gemma_leaves(config, *norms, second_norm="post_attention_norm")


def _own_fields(config: Gemma3Config) -> dict[str, Any]:
    from tunix.models.gemma3.model import AttentionType

    return {
        **gemma_fields(config, AttentionType),
        "local_base_frequency": config.rope_local_base_freq,
        "global_base_frequency": config.rope_theta,
        "global_scale_factor": 1.0 if config.scaling is None else config.scaling.factor,
        "use_tied_embedding": config.tie_word_embeddings,
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    rules=_RULES,
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    leaves=_leaves,
    divisible=DIVISIBLE,
    package="tunix.models.gemma3",
    model="Gemma3",
    own_fields=_own_fields,
    renamed=text_tensor,
)
