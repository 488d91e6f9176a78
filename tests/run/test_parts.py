"""What the engines of a run are built with."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.environments.template_families import tokenizer
from tests.models.random_checkpoint import write_random
from tpu_grpo.config import parse_config
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.run.parts import stop_ids, with_routing_replay


def test_engines_stop_where_turns_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model of Qwen's ends its texts with <|endoftext|>, and the chat template its turns with <|im_end|>."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    base: Any = tokenizer("qwen2_5")
    monkeypatch.setitem(base._special_tokens_map, "eos_token", "<|endoftext|>")
    config = parse_config({"environment": {"name": "guessing"}, "rewards": [{"name": "environment"}]})
    asked = [list(stop_ids(each.environment, each.data, base, tmp_path)) for each in (parse_config({}), config)]
    end_of_text, end_of_turn = base.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert asked == [[3, end_of_text], [3, end_of_text, end_of_turn]]


@pytest.mark.parametrize(
    ("model_type", "dtype", "algorithm", "replayed"),
    [
        ("qwen3_moe", "bfloat16", {}, True),
        ("qwen3_moe", "float32", {}, False),
        ("qwen3_moe", "bfloat16", {"routing_replay": False}, False),
        ("qwen3_moe", "float32", {"routing_replay": True}, True),
        ("qwen3_moe", "bfloat16", {"name": "tunix:grpo"}, None),
        ("qwen3", "bfloat16", {}, False),
    ],
)
def test_routing_is_replayed_by_default_where_experts_round(
    tmp_path: Path, model_type: str, dtype: str, algorithm: dict[str, Any], replayed: bool | None
) -> None:
    config = parse_config({"model": {"dtype": dtype}, "algorithm": algorithm})
    checkpoint = read_checkpoint(write_random(model_type, tmp_path, layers=1))
    found = with_routing_replay(config.algorithm, config.model, config.rollout, checkpoint)
    assert found.routing_replay is replayed
