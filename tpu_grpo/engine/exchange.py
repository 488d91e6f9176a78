"""Brings the completions of all replicas to all hosts, over the devices' interconnect.

    exchange = Exchange(requests, assigned, senders=[0, 0, 1], hosts=hosts)    # three replicas on two hosts
    completions = exchange.completions(own)
    completions = exchange.with_experts(completions, own, layout, context_tokens=4096)

Arrays have the same shape on every host and at every step, so that nothing is compiled later: what hosts send goes in
pieces of an even share, of which a host that served more than others sends several.

``pack`` makes of a completion a row of int32 ``[tokens, cached tokens, finish reason, ids..., log-probabilities...]``;
ids and log-probabilities take ``T = new_tokens`` places each, filled with 0. Log-probabilities keep their float32 bits.
Where completions say how many tokens the filters kept, these numbers take T places more.

The experts of a row's tokens are packed apart, because they are many: ``S * layers * k`` numbers of 8 or 16 bits, as
the bits of int32, which every device stores without padding.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.episode import Branch, Episode, Failure, KeptEnvironment, Turn
from tpu_grpo.records.stages import Completion, FinishReason, Request

PIECE_BYTES = 64 * 2**20
"""Experts and conversations go in pieces of at most about this size over all hosts, as every device holds a piece."""
FEWEST_BYTES = 2**16
"""A host sends at least so many bytes of its conversations; from there on powers of 2, so that few are compiled."""
REASONS: tuple[FinishReason, ...] = ("stop", "length")
HEAD = 3


@dataclass(frozen=True)
class Exchange:
    """The requests of one generation, and where they are served."""

    requests: Sequence[Request]
    assigned: Sequence[Sequence[int]]
    """The indices of each replica's requests."""
    senders: Sequence[int]
    """For each replica the host that sends its completions."""
    hosts: Hosts
    kept: bool = False
    """Whether completions say how many tokens the filters kept."""

    def completions(self, own: Mapping[int, Completion]) -> list[Completion]:
        """Gather all completions, without experts, in the order of the requests.

        ``own`` holds the completions of the replicas that this host drives, by the index of the request.
        """
        new_tokens = max((request.sampling.max_new_tokens for request in self.requests), default=1)
        mine, found = self._mine(own), {}
        for start in range(0, self._rows, self._share):
            end = start + self._share
            packed = pack(mine[start:end], self._share, new_tokens, kept=self.kept)
            tables = self.hosts.gather_array("completions", packed)
            for table, indices in zip(tables, self._sent, strict=True):
                rows = unpack(table[: len(indices[start:end])], kept=self.kept)
                found |= zip(indices[start:end], rows, strict=True)
        return [found[index] for index in range(len(self.requests))]

    def with_experts(
        self,
        completions: Sequence[Completion],
        own: Mapping[int, Completion],
        layout: ExpertLayout,
        context_tokens: int,
    ) -> list[Completion]:
        """Gather the experts of all ``completions``; every row is padded to ``context_tokens`` tokens."""
        mine, found = self._mine(own), list(completions)
        piece = max(1, PIECE_BYTES // (self.hosts.count * context_tokens * layout.token_bytes))
        piece = min(piece, self._share)
        for start in range(0, self._rows, piece):
            packed = pack_experts(mine[start : start + piece], piece, context_tokens, layout)
            for table, indices in zip(self.hosts.gather_array("experts", packed), self._sent, strict=True):
                for row, index in zip(table, indices[start : start + piece], strict=False):
                    computed = len(self.requests[index].token_ids) + len(found[index].token_ids) - 1
                    found[index] = unpack_experts(row, found[index], computed, layout)
        return found

    @cached_property
    def _sent(self) -> list[list[int]]:
        """For every host the requests whose completions it sends, in their order."""
        by_replica = list(zip(self.assigned, self.senders, strict=True))
        return [
            [index for indices, sender in by_replica if sender == host for index in indices]
            for host in range(self.hosts.count)
        ]

    @property
    def _rows(self) -> int:
        return max(map(len, self._sent))

    @property
    def _share(self) -> int:
        """Rows of a piece: an even share of the requests for each host that sends any."""
        return max(1, -(-len(self.requests) // len(set(self.senders))))

    def _mine(self, own: Mapping[int, Completion]) -> list[Completion]:
        return [own[index] for index in self._sent[self.hosts.index]]


def pack(
    completions: Sequence[Completion], rows: int, new_tokens: int, *, kept: bool = False
) -> Int[np.ndarray, "{rows} columns"]:
    """Pack completions of at most ``new_tokens`` tokens each, and append empty rows up to ``rows``."""
    table = np.zeros((rows, HEAD + (3 if kept else 2) * new_tokens), np.int32)
    for row, completion in zip(table, completions, strict=False):
        count = len(completion.token_ids)
        row[:HEAD] = count, completion.cached_tokens, REASONS.index(completion.finish_reason)
        row[HEAD : HEAD + count] = completion.token_ids
        row[HEAD + new_tokens : HEAD + new_tokens + count] = completion.logprobs.view(np.int32)
        if kept:
            assert completion.kept is not None, "all engines of a run count what filters keep, or none does"
            row[HEAD + 2 * new_tokens : HEAD + 2 * new_tokens + count] = completion.kept
    return table


def unpack(table: Int[np.ndarray, "R columns"], *, kept: bool = False) -> list[Completion]:
    """Unpack what ``pack`` packed; every row is a completion."""
    new_tokens = (table.shape[1] - HEAD) // (3 if kept else 2)
    found = []
    for row in table:
        count, cached, reason = (int(value) for value in row[:HEAD])
        logprobs = row[HEAD + new_tokens : HEAD + new_tokens + count].copy().view(np.float32)
        counts = row[HEAD + 2 * new_tokens : HEAD + 2 * new_tokens + count].copy() if kept else None
        found.append(Completion(row[HEAD : HEAD + count].copy(), logprobs, REASONS[reason], cached, kept=counts))
    return found


def pack_experts(
    completions: Sequence[Completion], rows: int, tokens: int, layout: ExpertLayout
) -> Int[np.ndarray, "{rows} columns"]:
    """Pack the experts of at most ``tokens`` tokens of each completion, and append empty rows up to ``rows``."""
    table = np.zeros((rows, -(-tokens * layout.token_bytes // 4)), np.int32)
    for row, completion in zip(table.view(np.uint8), completions, strict=False):
        assert completion.experts is not None, "every request of a batch asks for experts, or none does"
        packed = np.ascontiguousarray(completion.experts).reshape(-1).view(np.uint8)
        row[: packed.size] = packed
    return table


def unpack_experts(
    row: Int[np.ndarray, " columns"], completion: Completion, tokens: int, layout: ExpertLayout
) -> Completion:
    """Give a completion the experts of its first ``tokens`` tokens, prompt included, from a row of ``pack_experts``."""
    flat = np.ascontiguousarray(row).view(np.uint8)[: tokens * layout.token_bytes].copy().view(layout.dtype)
    return replace(completion, experts=flat.reshape(tokens, layout.layers, layout.per_token))


def exchange_conversations(own: Mapping[int, Completion], count: int, hosts: Hosts) -> list[Completion]:
    """Gather ``count`` completions with all that they hold, in the order of the requests; each is on one host."""
    if hosts.count == 1:
        return [own[index] for index in range(count)]
    data = encode_completions(own)
    sizes = [int(size) for size in hosts.gather("how large conversations are", str(len(data)).encode())]
    most = 2 ** ((PIECE_BYTES // hosts.count).bit_length() - 1)  # so that all hosts together send PIECE_BYTES at most
    piece = max(FEWEST_BYTES, min(most, 2 ** max(0, max(sizes) - 1).bit_length()))
    buffers = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), piece):
        part = data[start : start + piece].ljust(piece, b"\0")
        tables = hosts.gather_array("conversations", np.frombuffer(part, np.int32))  # which no device pads
        for buffer, table in zip(buffers, tables, strict=True):
            buffer += table.tobytes()
    found: dict[int, Completion] = {}
    for buffer, size in zip(buffers, sizes, strict=True):
        found |= decode_completions(buffer[:size])
    return [found[index] for index in range(count)]


def encode_completions(own: Mapping[int, Completion]) -> bytes:
    """Write completions, with all that they hold, by index as JSON; arrays and bytes are in base 64."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return [value.dtype.str, value.shape, plain(value.tobytes())]
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        assert is_dataclass(value), f"conversations hold records, arrays and JSON, got {type(value).__name__}"
        return vars(value)

    return json.dumps(sorted(own.items()), default=plain).encode()


def decode_completions(data: bytes | bytearray) -> dict[int, Completion]:
    """Read what ``encode_completions`` wrote."""
    return {index: _completion(given) for index, given in json.loads(data)}


def _completion(given: dict[str, Any]) -> Completion:
    arrays = {name: _array(given[name]) for name in ("token_ids", "logprobs", "experts", "kept", "sampled")}
    episode: Any = given["episode"] and _episode(given["episode"])
    return Completion(**given | arrays | {"episode": episode})


def _episode(given: dict[str, Any]) -> Episode:
    kept = given["kept"]
    if kept is not None:
        kept = KeptEnvironment(**kept | {"state": base64.b64decode(kept["state"])})
    return Episode(
        **given
        | {
            "branches": tuple(
                Branch(**branch | {"prompt": tuple(branch["prompt"]), "experts": _array(branch["experts"])})
                for branch in given["branches"]
            ),
            "turns": tuple(Turn(**turn | {"calls": tuple(turn["calls"])}) for turn in given["turns"]),
            "messages": tuple(given["messages"]),
            "failure": given["failure"] and Failure(**given["failure"]),
            "kept": kept,
        }
    )


def _array(given: list[Any] | None) -> Any:
    if given is None:
        return None
    dtype, shape, data = given
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
