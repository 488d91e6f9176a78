"""Exchanges values between hosts, and checks values that must be the same on all hosts.

Every host must make the same calls in the same order, on its main thread. The calls are numbered. If another host is
at a different call, or missing, the call raises instead of waiting forever.
"""

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tpu_grpo.hosts.ending import host_names
from tpu_grpo.records.errors import LockstepError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Shaped

    from tpu_grpo.hosts.coordination_service import Service  # only several hosts have one

ROOT = "tpu_grpo/exchange"
SHOWN = 60
"""Messages show values of up to this many characters; longer values are replaced by a digest."""
ABSENT = "no value"


def attacked(where: str, got: str) -> LockstepError:
    """Return the error for a value at ``where`` that no host of the run can have written; ``got`` describes it."""
    return LockstepError(
        f"only the hosts of a run may write what they tell each other, got {got[:300]} at {where[:100]!r}: somebody "
        "else has written in their place, through the coordinator's port or from a host with damaged memory; see who "
        "can reach them"
    )


def read_told(value: bytes, kind: object, where: str, read: Callable[[Any], Any] = lambda value: value) -> Any:
    """Parse the JSON that a host sent, check that it has the type ``kind``, and return ``read(parsed)``. Raises
    LockstepError if the value has another type, or ``read`` raises ValueError: no host can have sent it."""
    try:
        return read(_adapter(kind).validate_json(value))
    except ValueError as error:
        raise attacked(where, "what no host tells") from error


@cache
def _adapter(kind: object) -> Any:
    from pydantic import TypeAdapter  # takes 0.1 s; the supervisor of local hosts does not need it

    return TypeAdapter(kind)


def packed(numbers: "Float[np.ndarray, ' N']") -> str:
    """Encode float64 numbers exactly, as compressed base64 text; the text is short if many numbers are equal."""
    return base64.b64encode(zlib.compress(numbers.astype("<f8").tobytes(), level=1)).decode()


def unpacked(text: str, count: int) -> "Float[np.ndarray, ' N']":
    """Decode ``count`` numbers that another host encoded with ``packed``; raises ValueError for anything else."""
    import numpy as np

    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 8 * count + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) != 8 * count:
        raise ValueError(f"{count} numbers must have {8 * count} bytes, got {len(data)}")
    return np.frombuffer(data, "<f8").astype(np.float64)


def _encoded(value: Any) -> bytes:
    """Write a value as JSON. Half of a surrogate pair, which a broken file may hold, becomes a question mark."""
    return json.dumps(value, default=vars, ensure_ascii=False).encode(errors="replace")


class Hosts:
    """Connects the hosts of a run. With one host, every method returns immediately, and nothing is sent.

    Hosts talk through ``service``, which is None for a single process. ``members`` are the numbers of the hosts that
    take part: all of them, or a group made by ``among``. An exchange waits ``timeout_seconds`` for the slowest host. A
    lost host is noticed much earlier by ``Watch``; this timeout ends runs whose hosts live, but make different calls.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        service: "Service | None" = None,
        *,
        timeout_seconds: float = 1800.0,
        members: Sequence[int] | None = None,
    ) -> None:
        if count > 1 and service is None:
            raise ValueError(f"{count} hosts need a service to talk through; tpu_grpo.hosts.start makes one")
        self.index = index
        self.count = count
        self.service = service
        self.timeout_seconds = timeout_seconds
        self.members = tuple(range(count)) if members is None else tuple(sorted(members))
        self._root = ROOT if members is None else f"{ROOT}/{'-'.join(map(str, self.members))}"
        self._exchanges = 0
        self._groups: dict[tuple[int, ...], Hosts] = {self.members: self}

    def among(self, members: Sequence[int]) -> "Hosts":
        """Return the group of the hosts ``members``, which must include this host. Its exchanges involve no other host.

        Equal ``members`` always give the same group. Exchanged values are in ascending order of the members.
        """
        if self.index not in members:
            raise ValueError(f"host {self.index} must be among the hosts it exchanges with, got {list(members)}")
        group = tuple(sorted(members))
        if group not in self._groups:
            seconds = self.timeout_seconds
            self._groups[group] = Hosts(self.index, self.count, self.service, timeout_seconds=seconds, members=group)
        return self._groups[group]

    @property
    def is_first(self) -> bool:
        """Whether this is host 0, which writes the files that a run writes only once."""
        return self.index == 0

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Return every member's ``value``, in ascending order of the members; every member gets the same list.

        ``name`` describes the value, and must be the same on every member.

        Raises:
            LockstepError: a host did not answer, or is at another exchange.
        """
        if self.service is None or len(self.members) == 1:
            return [value]
        self._exchanges += 1
        number = self._exchanges
        self.service.put(f"{self._root}/{number}/{self.index}", name.encode() + b"\0" + value)
        answers = self._collect(self.service, name, number)
        # All hosts have answered this exchange, so all have read this host's previous value: it can be deleted.
        if number > 1:
            self.service.delete(f"{self._root}/{number - 1}/{self.index}")
        parts = [answers[index].partition(b"\0") for index in self.members]
        names = [part[0].decode(errors="replace") for part in parts]
        if len(set(names)) > 1:
            raise LockstepError(
                f"hosts must do the same in the same order; at exchange {number}, {self._listing(names)}"
            )
        return [part[2] for part in parts]

    def share(
        self, name: str, value: Any, kind: object, read: Callable[[int, Any], Any] = lambda host, value: value
    ) -> list[Any]:
        """Return every member's ``value``, like ``gather``; values have the type ``kind``, and are sent as JSON.

        Dataclasses are sent as their fields. ``read(host, value)`` converts each received value, and raises ValueError
        for a value that the host cannot have sent.

        Raises:
            LockstepError: a value has another type, or ``read`` refuses it. Raises as ``gather`` does, too.
        """
        answers = self.gather(name, _encoded(value))
        return [
            read_told(answer, kind, f"{name} of host {index}", partial(read, index))
            for index, answer in zip(self.members, answers, strict=True)
        ]

    def gather_array(self, name: str, array: "Shaped[np.ndarray, '...']") -> "Shaped[np.ndarray, 'H ...']":
        """Stack the arrays of all H hosts, which must have the same shape and dtype, along a new first axis.

        Use this for arrays that are too large for ``gather``: the data goes over the devices' interconnect. Raises as
        ``gather`` does.
        """
        if self.service is None:
            return array[None]
        import numpy as np
        from jax.experimental import multihost_utils

        self.agree(f"the shape of {name}", f"{array.dtype} {list(array.shape)}")
        return np.asarray(multihost_utils.process_allgather(array))

    def _collect(self, service: "Service", name: str, number: int) -> dict[int, bytes]:
        directory = f"{self._root}/{number}"
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            seen = service.list(directory)
            answers = {index: seen[str(index)] for index in self.members if str(index) in seen}
            if self.index not in answers:
                raise attacked(f"{directory}/{self.index}", "nothing any more")
            missing = [index for index in self.members if index not in answers]
            if not missing:
                return answers
            left = deadline - time.monotonic()
            if left <= 0:
                raise LockstepError(
                    f"every host must reach {name} within {self.timeout_seconds:g} s; {host_names(missing)} did not; "
                    "see what they print, and whether they run the same command"
                )
            service.wait(f"{directory}/{missing[0]}", left)

    def barrier(self, name: str) -> None:
        """Return once every member has called this; raises as ``gather`` does."""
        self.gather(name, b"")

    def broadcast(self, name: str, value: Any, kind: object, read: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return the value of the first member, usually host 0, on every member; the other values are ignored. Raises
        as ``share`` does."""
        mine = _encoded(value) if self.index == self.members[0] else b""
        return read_told(self.gather(name, mine)[0], kind, f"{name} of host {self.members[0]}", read)

    def agree(self, name: str, value: str | bytes) -> None:
        """Check that the value is the same on every host. Raises LockstepError if values differ; every host raises the
        same message. Raises as ``gather`` does, too."""
        self._compare(f"the agreement on {name}", {name: value})

    def agree_all(self, values: Mapping[str, str]) -> None:
        """Check many named values in one exchange; the error lists all that differ. Raises as ``agree`` does."""
        self._compare("the agreement on settings", values)

    def _compare(self, name: str, values: Mapping[str, str | bytes]) -> None:
        shown = {key: _short(value) for key, value in values.items()}
        everyone = self.share(name, shown, dict[str, str])
        keys = dict.fromkeys(key for values in everyone for key in values)
        differing = {key: [values.get(key, ABSENT) for values in everyone] for key in keys}
        lines = [f"{key} differs: {self._listing(found)}" for key, found in differing.items() if len(set(found)) > 1]
        if lines:
            raise LockstepError("\n  ".join(["every host must have the same; start all from the same files", *lines]))

    def _listing(self, found: Sequence[str]) -> str:
        """List the hosts with each value, the rarest value first: "host 1 has 'b'; hosts 0, 2, 3 have 'a'"."""
        groups: dict[str, list[int]] = {}
        for index, value in zip(self.members, found, strict=True):
            groups.setdefault(value, []).append(index)
        ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
        return "; ".join(
            f"{host_names(who)} {'has' if len(who) == 1 else 'have'} {_cut(value)}" for value, who in ordered
        )


def _short(value: str | bytes) -> str:
    """Return the value itself if it is short and printable, else a digest of it."""
    if isinstance(value, str) and len(value) <= SHOWN and value.isprintable():
        return repr(value)
    data = value.encode() if isinstance(value, str) else value
    return f"sha256 {hashlib.sha256(data).hexdigest()}"


def _cut(value: str) -> str:
    return f"{value[:19]}..." if value.startswith("sha256 ") else value
