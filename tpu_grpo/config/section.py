"""What every section of a config is made of."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the config: frozen, strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _switches_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and bool not in _kinds(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"must not be a switch, got {str(value).lower()}; `--help` lists what it takes")
        return value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types a setting may have: ``bool | None`` has two."""
    return get_args(annotation) or (annotation,)
