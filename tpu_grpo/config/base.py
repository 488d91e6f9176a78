"""What every section of the config is."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the config: frozen, strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _switches_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"must not be a switch, got {str(value).lower()}; `--help` lists what it takes")
        return value
