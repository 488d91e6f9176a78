"""Sends the completions of every host, with all of their arrays, to all hosts over the devices' interconnect.

    completions, senders = exchange_completions(own, count=64, hosts=hosts, room=share_bytes(requests, senders=2))

A host encodes its completions as the size of a JSON text, the text, and the bytes of the arrays to which the text
refers. All hosts send the same number of pieces of the same size, enough for the host with the most bytes. Received
bytes are parsed and checked, and never executed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import jaxtyped
from pydantic import ConfigDict, Field, TypeAdapter

from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.hosts import Hosts
from tpu_grpo.hosts.host_agreement import attacked
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Request

PIECE_BYTES = 64 * 2**20
"""All hosts' pieces together have about this many bytes at most, because each device holds all pieces."""
FEWEST_BYTES = 2**16
"""The smallest size of a piece, in bytes. All sizes are powers of 2, so that few sizes are compiled."""
ROW_BYTES, TOKEN_BYTES = 320, 12
"""The most bytes of a completion's JSON text, and the bytes of each token's id, log-probability, and number of tokens
that the filters kept."""

SIZE = Annotated[int, Field(ge=0, le=2**40)]
"""The type of the number of bytes that a host has to send; received numbers are checked against it."""
COMPLETION = TypeAdapter(tuple[int, Completion], config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))


def share_bytes(
    requests: Sequence[Request], senders: int, context_tokens: int = 0, layout: ExpertLayout | None = None
) -> int:
    """Return the most bytes that one of ``senders`` hosts sends if all send equally many of the requests' completions.

    Conversations may take more bytes. The number is the same at every step, so that nothing is compiled after the first
    step. With ``layout``, completions include experts.
    """
    new = max((request.sampling.max_new_tokens for request in requests), default=1)
    experts = 0 if layout is None else context_tokens * layout.token_bytes
    return -(-len(requests) // senders) * (ROW_BYTES + TOKEN_BYTES * new + experts)


def exchange_completions(
    own: Mapping[int, Completion], count: int, hosts: Hosts, room: int | None = None
) -> tuple[list[Completion], list[int]]:
    """Gather ``count`` completions; returns them in the order of the requests, and the host that sent each.

    Args:
        own: the completions that only this host sends, by the index of the request.
        count: the number of requests.
        hosts: the processes of the run. All must call this; a host that samples nothing sends nothing.
        room: the wanted bytes of a piece, before rounding and limits; None: all bytes of the host that sends most.
    """
    if hosts.count == 1:
        return [own[index] for index in range(count)], [0] * count
    data = encode_completions(own)
    sizes = hosts.share("how large completions are", len(data), SIZE)
    most = 2 ** ((PIECE_BYTES // hosts.count).bit_length() - 1)  # so that all hosts together send PIECE_BYTES at most
    wanted = max(sizes) if room is None else room
    piece = max(FEWEST_BYTES, min(most, 2 ** max(0, wanted - 1).bit_length()))
    buffers = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), piece):
        part = data[start : start + piece].ljust(piece, b"\0")
        tables = hosts.gather_array("completions", np.frombuffer(part, np.int32))  # devices do not pad int32
        for buffer, table in zip(buffers, tables, strict=True):
            buffer += table.tobytes()
    found, senders = dict[int, Completion](), dict[int, int]()
    for host, (buffer, size) in enumerate(zip(buffers, sizes, strict=True)):
        sent = decode_completions(buffer[:size], host)
        if others := [index for index in sent if index in found or not 0 <= index < count]:
            raise attacked(
                f"the completions of host {host}", f"completion {others[0]} of {count}, which is none of its own"
            )
        found |= sent
        senders |= dict.fromkeys(sent, host)
    if lost := sorted(set(range(count)) - set(found)):
        raise LockstepError(f"hosts must send each other all {count} completions, got none for {lost}")
    return [found[index] for index in range(count)], [senders[index] for index in range(count)]


def encode_completions(own: Mapping[int, Completion]) -> bytes:
    """Encode completions, by index; the JSON text refers to arrays by type, shape and offset."""
    raw = bytearray()

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | bytes):
            array, start = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value, len(raw)
            raw.extend(array.tobytes())
            return array.dtype.str, array.shape, start
        assert is_dataclass(value), f"completions hold records, arrays and JSON, got {type(value).__name__}"
        return vars(value)

    text = json.dumps(list(own.items()), default=plain).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, raw])


def decode_completions(data: bytes | bytearray, host: int = 0) -> dict[int, Completion]:
    """Decode the bytes that ``encode_completions`` made on another host.

    Raises:
        LockstepError: if a value has a type, shape or size that ``encode_completions`` never writes.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    raw = memoryview(data)[end:]

    def array(given: list[Any] | None) -> Any:
        if given is None:
            return None
        kind, shape, start = given
        if not re.fullmatch(r"[<|](b1|[uif][1248])", kind):
            raise ValueError(f"an array must hold numbers, got {kind!r}")
        return np.frombuffer(raw, kind, math.prod(shape), start).reshape(shape).copy()

    try:
        given = json.loads(data[8:end])
        for _, completion in given:
            for name in ("token_ids", "logprobs", "experts", "kept", "ages", "sampled"):
                completion[name] = array(completion[name])
            if episode := completion["episode"]:
                for branch in episode["branches"]:
                    branch["experts"] = array(branch["experts"])
                if kept := episode["kept"]:
                    kept["state"] = array(kept["state"]).tobytes()
        found = [_checked(indexed) for indexed in given]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise attacked(f"the completions of host {host}", str(error)) from error
    for index, completion in found:
        _check_parts(index, completion, host)
    return dict(found)


@jaxtyped(typechecker=None)  # so that T is one number in all arrays of a completion
def _checked(indexed: Any) -> tuple[int, Completion]:
    return COMPLETION.validate_python(indexed)


def _check_parts(index: int, completion: Completion, host: int) -> None:
    """Check that the parts of a completion lie within its tokens."""
    count, episode = len(completion.token_ids), completion.episode
    parts = () if episode is None else (*episode.turns, *episode.branches)
    if completion.cached_tokens < 0 or not all(0 <= part.start <= part.end <= count for part in parts):
        raise attacked(
            f"the completions of host {host}", f"completion {index} with parts that are not of its {count} tokens"
        )
