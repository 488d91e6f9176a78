"""Explains what gcloud says when something is wrong, and what to do about it.

The first pattern that is found decides, so the particular stand before the general.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Describes a kind of failure, which is recognised by a pattern in what gcloud printed, whatever the case."""

    kind: str
    pattern: str
    remedy: str
    retriable: bool = False
    """``babysit`` gives the same command again: it may succeed later."""


UNKNOWN = Explanation(
    "unknown", "", "look at what gcloud printed above; `gcloud info --show-log` has the details", retriable=True
)
WORKER = Explanation("worker", "", "see what the workers said; mend that, then give the command again", retriable=True)
"""gcloud did its part, and a worker failed."""

EXPLANATIONS = (
    Explanation(
        "login",
        r"do not currently have an active account|Reauthentication|invalid_grant|refreshing your current auth tokens",
        "log in with `gcloud auth login`",
    ),
    Explanation(
        "project",
        r"required property \[(core/)?project\]|project.{0,40}could not be found|\[project\] is not",
        "give --project, or `gcloud config set project PROJECT`",
    ),
    Explanation(
        "api",
        r"SERVICE_DISABLED|API has not been used|API \[.*\] not enabled",
        "enable it with `gcloud services enable tpu.googleapis.com`, and wait a few minutes",
    ),
    Explanation(
        "zone",
        r"required property \[compute/zone\]|Failed to find attribute \[zone\]|Error parsing \[(tpu|queued_resource)\]"
        r"|Permission denied on 'locations/|Location .{0,40} (is|was) not found",
        "give --zone (or `gcloud config set compute/zone ZONE`), one that `gcloud compute tpus locations list` shows",
    ),
    Explanation(
        "type",
        r"invalid AcceleratorType|accelerator.?type.{0,80}(not found|invalid|not available|not supported)",
        "the zone has no such slice: `gcloud compute tpus accelerator-types list --zone=ZONE` shows what it has",
    ),
    Explanation(
        "quota",
        r"quota (limit|exceeded)|Quota '|QuotaFailure|exceeded.{0,40}quota",
        "the project may not use so many chips of this kind there: use a zone and a kind (--spot or not) that you have "
        "quota for, delete what you no longer use, or ask for more on the console's quota page",
        retriable=True,
    ),
    Explanation(
        "capacity",
        r"no more capacity|Insufficient (reserved )?capacity|stockout|RESOURCE_POOL_EXHAUSTED|\"?code\"?: 13\b",
        "there are none free in this zone now: wait in the queue (--how queued), or try another zone or a smaller "
        "slice",
        retriable=True,
    ),
    Explanation(
        "agent",
        r"not present in the SSH agent",
        "load the key first: `ssh-add ~/.ssh/google_compute_engine` (start an agent with `eval $(ssh-agent)`); several "
        "workers cannot be reached at once without",
    ),
    Explanation(
        "gone",
        r"terminal state|while in state PREEMPTED|is in state \"?(PREEMPTED|TERMINATED)",
        "it was preempted: delete it and create it anew, or let `babysit` do so",
        retriable=True,
    ),
    Explanation(
        "maintenance",
        r"maintenance event|cannot be currently connected to",
        "wait until `status` shows READY and HEALTHY",
        retriable=True,
    ),
    Explanation(
        "exists",
        r"ALREADY_EXISTS|already exists",
        "use it, delete it first, or take another --name",
        retriable=True,
    ),
    Explanation(
        "missing",
        r"NOT_FOUND|was not found|not found: |could not be found",
        "check --name, --zone, --project and --how (`gcloud compute tpus tpu-vm list --zone=ZONE` shows what there is)",
        retriable=True,
    ),
    Explanation(
        "ssh",
        r"return code \[?255|status 255|Connection (timed out|refused|closed|reset)|Permission denied \(publickey"
        r"|Network is unreachable|kex_exchange_identification|IAP tunneling",
        "a worker does not answer: wait a minute after its creation, load the key with `ssh-add`, allow port 22 in the "
        "network's firewall, or, without external addresses, use --internal-ip or --tunnel-through-iap",
        retriable=True,
    ),
    Explanation(
        "permission",
        r"PERMISSION_DENIED|does not have permission|Required '.*' permission|Permission '.*' denied|\b403\b",
        "your account needs the role TPU Admin (roles/tpu.admin), and Service Account User for --service-account",
    ),
    Explanation(
        "passing",
        r"UNAVAILABLE|DEADLINE_EXCEEDED|\bINTERNAL\b(?!-)|50[0234]\b|Unable to find the server|Max retries exceeded",
        "a passing fault of the service or the network: try again in a minute",
        retriable=True,
    ),
)


def explain(text: str) -> Explanation:
    """Return the kind of failure that ``text``, printed by gcloud, speaks of."""
    found = (e for e in EXPLANATIONS if re.search(e.pattern, text, re.IGNORECASE | re.DOTALL))
    return next(found, UNKNOWN)
