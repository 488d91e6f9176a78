"""Which TPU, where, and how it is asked for: every setting once, with the flag and the variable it comes from."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tpu_grpo.errors import ConfigError
from tpu_grpo.launching.tpus import Slice, parse_slice

VARIABLES = {"name": "TPU_NAME", "zone": "TPU_ZONE", "project": "TPU_PROJECT", "type": "TPU_TYPE"}
"""Environment variables that are read where a flag is missing; gcloud's own configuration follows them."""


@dataclass(frozen=True)
class Settings:
    """One TPU, by the flags of the command line."""

    name: str
    """Of the node, and of the queued resource that asks for it."""
    zone: str | None = None
    """gcloud's compute/zone when None."""
    project: str | None = None
    """gcloud's core/project when None."""
    type: Slice | None = None
    """Needed to create it only."""
    how: Literal["queued", "vm"] = "queued"
    """Asked for through a queue that waits for capacity, or at once."""
    spot: bool = False
    reserved: bool = False
    runtime: str | None = None
    """Software version of the machines; the family's when None."""
    service_account: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    internal_ips: bool = False
    """Machines get no external address."""
    valid_until: str | None = None
    """How long a queued request may wait, such as 6h."""
    user: str | None = None
    """Whom to log in as on the workers."""
    internal_ip: bool = False
    """Connect through the internal address (from a machine in the same network)."""
    tunnel_through_iap: bool = False
    """Connect through Identity-Aware Proxy; only gcloud's alpha commands can."""
    ssh_key_file: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            raise ConfigError(
                f"--name must be lower-case letters, digits and dashes, beginning with a letter, got {self.name!r}"
            )
        if self.spot and self.reserved:
            raise ConfigError("--spot and --reserved exclude each other, got both; leave one out")
        if self.how == "vm" and self.valid_until:
            raise ConfigError(f"--valid-until needs --how queued, got {self.valid_until}; a TPU VM does not wait")
        if self.internal_ip and self.tunnel_through_iap:
            raise ConfigError("--internal-ip and --tunnel-through-iap exclude each other, got both; leave one out")

    @property
    def slice(self) -> Slice:
        """The slice to create. Raises ConfigError when no type was given."""
        if self.type is None:
            raise ConfigError("--type must say which slice to create, got none; for example --type v5e-16")
        return self.type


def settings_from(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from parsed flags, by field name; None is a flag that was not given."""
    values = {field.name: flags[field.name] for field in fields(Settings) if flags.get(field.name) is not None}
    for name, variable in VARIABLES.items():
        if name not in values and environment.get(variable):
            values[name] = environment[variable]
    if "name" not in values:
        raise ConfigError(f"--name must say which TPU, got none; give it, or set {VARIABLES['name']}")
    if "type" in values:
        values["type"] = parse_slice(values["type"])
    return Settings(**values)
