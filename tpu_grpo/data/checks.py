"""These checks hold for records of every kind."""

from collections.abc import Mapping
from typing import Any

from tpu_grpo.records.errors import DataError


def check_keys(record: Mapping[str, Any], first: Mapping[str, Any], where: str, first_is: str) -> None:
    """See that a record has the keys of the first one, which errors call ``first_is``.

    Raises:
        DataError: naming what it lacks and adds.
    """
    if record.keys() == first.keys():
        return
    lacking, extra = sorted(first.keys() - record.keys()), sorted(record.keys() - first.keys())
    found = " and ".join(part for part in (f"lacks {lacking}" * bool(lacking), f"adds {extra}" * bool(extra)) if part)
    raise DataError(
        f"{where} must have the keys of {first_is}, {list(first)}, but {found}; write null where there is none"
    )
