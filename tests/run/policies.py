"""Policies of small random models, as training might have left them, for what exports them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models.forward import trainer_mesh
from tests.models.random_checkpoint import GEMMA4_EXPERTS
from tests.several.runs import settings, write_files
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tokenizers import load_tokenizer
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.run.exporting import Policy
from tpu_grpo.run.policies import with_adapters

TOKENS_BT = np.random.default_rng(0).integers(2, 264, (2, 12))
LORA = {"rank": 3, "alpha": 6.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "llama": {"tied": False},
    "mistral": {"tied": False},
    "phi3": {"tied": False},
    "gemma2": {},
    "gemma3_text": {"tied": False},
    "gemma4_text": GEMMA4_EXPERTS,
}
"""Every family, some of them with a head of its own."""


def run_config(files: Path, **sections: Any) -> RunConfig:
    """A run's config with the model that lies in ``files``."""
    tree = settings(files / "run", **sections)
    return parse_config(tree | {"model": tree["model"] | {"path": str(files / "model")}})


def trained(config: RunConfig, *, change_base: bool = True) -> Policy:
    """The policy of a run: every parameter is another one than its model's, and adapters are not zero."""
    checkpoint = read_checkpoint(Path(config.model.path))
    base = load_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.dtype(config.model.dtype), remat="none")
    if change_base:
        change(base, 0.02)
    model = with_adapters(base, checkpoint, config.model, config.run.seed)
    if model is not base:
        change(model, 0.05, nnx.LoRAParam)
    return Policy(model, 7, checkpoint, load_tokenizer(checkpoint.directory))


def change(model: nnx.Module, scale: float, kind: Any = nnx.Param) -> None:
    """Add random numbers to a model's parameters, in place."""
    state = nnx.state(model, kind)
    for number, (_, leaf) in enumerate(nnx.to_flat_state(state)):
        old = leaf[...]
        noise = scale * np.random.default_rng(number).standard_normal(old.shape)
        leaf[...] = jax.device_put((np.asarray(old) + noise).astype(old.dtype), old.sharding)
    nnx.update(model, state)


def write_model(directory: Path, family: str, **options: Any) -> Path:
    """Files of a run of a family; returns their directory. Float32 tells its logits apart to 1e-6."""
    sizes: dict[str, Any] = {"scale": 0.08, **options}
    return write_files(directory, model_type=family, **sizes)
