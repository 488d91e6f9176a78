"""Reads the JSON files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from tpu_grpo.records.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointError: when the file is missing, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint directory needs it beside its *.safetensors files"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got a {type(value).__name__}; copy it again")
    return value
