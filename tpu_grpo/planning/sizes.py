"""What a model costs: FLOPs of a token, and what a step of an engine reads, passes on and is launched with.

These follow from config.json and the tensors of a checkpoint; nothing is compiled for them.
"""

import math
import re
from dataclasses import dataclass

from tpu_grpo.models import Checkpoint
from tpu_grpo.planning.rates import STEP_INPUTS

EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = (EMBEDDING, "lm_head.weight")


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in a forward pass of a model."""

    layers: float
    """The parameters that a token meets in all layers."""
    head: float
    """The parameters of the output head."""
    attention: float
    """FLOPs per token of context, in all layers."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "TokenCost":
        """Compute it from the checkpoint's tensors; of the experts, only those that a token uses count."""
        config, shapes = checkpoint.config, checkpoint.family.tensor_shapes(checkpoint.config)
        used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
        met = 0.0
        for name, shape in shapes.items():
            if ".layers." in name and len(shape) == 2:
                met += shape[0] * shape[1] * (used if ".experts." in name else 1.0)
        heads = config.num_attention_heads * config.head_dim
        return cls(met, config.vocab_size * config.hidden_size, 4.0 * heads * config.num_hidden_layers)

    def forward(self, tokens: float, context: float, predicted: float) -> float:
        """FLOPs of a forward pass over ``tokens`` tokens, of which ``predicted`` get logits."""
        return tokens * (2 * self.layers + self.attention * context) + 2 * self.head * predicted


@dataclass(frozen=True)
class EngineSizes:
    """What a step of an engine reads, passes on and is launched with; bytes are per device."""

    tensor: int
    """The devices of the engine."""
    layers: int
    token: TokenCost
    weight_bytes: float
    """Weights that every step reads: all but the experts, and but an embedding that is not the head as well, of which
    a step reads a row for each token."""
    expert_bytes: float
    experts: int
    """The experts of a layer; 1 for a model without."""
    used_experts: int
    """The experts that a token uses."""
    cache_bytes: float
    """Keys and values of one token, in all layers."""
    state_bytes: float
    """The activations of one token between layers; they are whole on every device."""
    arrays: int
    """The arrays that a step is launched with."""
    cache_itemsize: int = 2
    """Bytes of a number of the cache."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        tensor: int,
        itemsize: int,
        split_vocabulary: bool,
        cache_bytes: float,
        cache_itemsize: int = 2,
    ) -> "EngineSizes":
        """Compute them for an engine of ``tensor`` devices whose numbers have ``itemsize`` bytes."""
        config, shapes = checkpoint.config, checkpoint.family.tensor_shapes(checkpoint.config)
        weights = experts = 0.0
        for name, shape in shapes.items():
            size = math.prod(shape) * itemsize
            if ".experts." in name:
                experts += size / tensor
            elif name != EMBEDDING or config.tie_word_embeddings:
                weights += size / (tensor if name not in VOCABULARY or split_vocabulary else 1)
        names = {re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in shapes}
        return cls(
            tensor=tensor,
            layers=config.num_hidden_layers,
            token=TokenCost.of(checkpoint),
            weight_bytes=weights,
            expert_bytes=experts,
            experts=getattr(config, "num_experts", 1),
            used_experts=getattr(config, "num_experts_per_tok", 1),
            cache_bytes=cache_bytes,
            state_bytes=config.hidden_size * itemsize,
            arrays=len(names) + config.num_hidden_layers + STEP_INPUTS,
            cache_itemsize=cache_itemsize,
        )

    def read_bytes(self, tokens: float) -> float:
        """Weights that a step over ``tokens`` tokens reads; of the experts, those that are expected to get a token."""
        idle = (1 - self.used_experts / self.experts) ** tokens
        return self.weight_bytes + self.expert_bytes * (1 - idle)
