"""The documented syntax of the gcloud commands that are used, and a check of words against it.

From the reference pages (SYNOPSIS) of ``gcloud compute tpus ...``, the general availability track unless alpha is
named, as last updated in 2025. Flags that a command has and this package does not use are listed too: what is checked
is that a command is valid, not that it is the one we wrote.
"""

import sys
from dataclasses import dataclass

WIDE = {
    "--account=",
    "--billing-project=",
    "--configuration=",
    "--flags-file=",
    "--flatten=",
    "--format=",
    "--impersonate-service-account=",
    "--log-http",
    "--project=",
    "--quiet",
    "--trace-token=",
    "--user-output-enabled",
    "--verbosity=",
}
"""Of every command."""


@dataclass(frozen=True)
class Syntax:
    """One command. A flag that ends with = takes a value."""

    positionals: tuple[int, int]
    flags: frozenset[str]
    required: frozenset[str] = frozenset()
    exclusive: tuple[frozenset[str], ...] = ()
    one_of: frozenset[str] = frozenset()


def _flags(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MACHINE = (
    "--accelerator-type= --async --boot-disk= --data-disk= --description= --internal-ips --labels= --metadata= "
    "--metadata-from-file= --network= --range= --reserved --scopes= --service-account= --shielded-secure-boot --spot "
    "--subnetwork= --tags= --topology= --type= --zone= "
)
_SSH = (
    "--dry-run --force-key-file-overwrite --internal-ip --plain --ssh-key-expiration= --ssh-key-expire-after= "
    "--ssh-key-file= --strict-host-key-checking= --worker= --zone= "
)
_COMMAND = "--command= --output-directory= --ssh-flag= "
_COPY = "--compress --recurse --scp-flag= "
_ALPHA = "--batch-size= --tunnel-through-iap "
_ROUTES = (frozenset({"--internal-ip", "--tunnel-through-iap"}),)

COMMANDS: dict[tuple[str, ...], Syntax] = {
    ("compute", "tpus", "tpu-vm", "create"): Syntax(
        (1, 1), _flags(_MACHINE + "--preemptible --queue-count= --version="), frozenset({"--version="})
    ),
    ("compute", "tpus", "tpu-vm", "describe"): Syntax((1, 1), _flags("--zone=")),
    ("compute", "tpus", "tpu-vm", "delete"): Syntax((1, 1), _flags("--async --zone=")),
    ("compute", "tpus", "tpu-vm", "ssh"): Syntax((1, 1), _flags(_SSH + _COMMAND)),
    ("compute", "tpus", "tpu-vm", "scp"): Syntax((2, 99), _flags(_SSH + _COPY)),
    ("alpha", "compute", "tpus", "tpu-vm", "ssh"): Syntax((1, 1), _flags(_SSH + _COMMAND + _ALPHA), exclusive=_ROUTES),
    ("alpha", "compute", "tpus", "tpu-vm", "scp"): Syntax((2, 99), _flags(_SSH + _COPY + _ALPHA), exclusive=_ROUTES),
    ("storage", "rsync"): Syntax((2, 2), _flags("--continue-on-error --dry-run --exclude= --recursive")),
    ("compute", "tpus", "queued-resources", "create"): Syntax(
        (1, 1),
        _flags(
            _MACHINE + "--guaranteed --node-count= --node-id= --node-prefix= --reservation-host-folder= "
            "--reservation-host-organization= --reservation-host-project= --runtime-version= --valid-after-duration= "
            "--valid-after-time= --valid-until-duration= --valid-until-time="
        ),
        frozenset({"--runtime-version=", "--accelerator-type="}),
        (frozenset({"--node-id=", "--node-prefix="}),),  # the prefix goes with the count
        frozenset({"--node-id=", "--node-count="}),
    ),
    ("compute", "tpus", "queued-resources", "describe"): Syntax((1, 1), _flags("--zone=")),
    ("compute", "tpus", "queued-resources", "delete"): Syntax((1, 1), _flags("--async --force --zone=")),
}


def split(words: list[str]) -> tuple[tuple[str, ...], list[str], dict[str, str]]:
    """(command, positionals, flags) of words after gcloud; a switch's value is ""."""
    command = next((c for c in COMMANDS if tuple(words[: len(c)]) == c), None)
    assert command is not None, f"no such command: {words[:5]}"
    rest = words[len(command) :]
    positionals = [word for word in rest if not word.startswith("-")]
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in rest if word.startswith("-")}
    return command, positionals, flags


def check(words: list[str]) -> None:
    """Raise AssertionError unless the words, gcloud first, are a valid command."""
    assert words[0] == "gcloud", words
    command, positionals, flags = split(words[1:])
    syntax = COMMANDS[command]
    least, most = syntax.positionals
    assert least <= len(positionals) <= most, f"{command} takes {least} to {most} arguments, got {positionals}"
    given = {f"{word.split('=')[0]}=" if "=" in word else word for word in words if word.startswith("-")}
    assert given <= syntax.flags | WIDE, f"{command} has no {sorted(given - syntax.flags - WIDE)}"
    assert syntax.required <= given, f"{command} needs {sorted(syntax.required - given)}"
    for group in syntax.exclusive:
        assert len(group & given) <= 1, f"{command}: {sorted(group)} exclude each other"
    assert not syntax.one_of or len(syntax.one_of & given) == 1, f"{command} needs one of {sorted(syntax.one_of)}"
    assert "--output-directory" not in flags or flags.get("--command"), "--output-directory needs --command"


if __name__ == "__main__":
    check(["gcloud", *sys.argv[1:]])
