"""One message between the pools: a header of 64 bytes, then `length` bytes of payload.

The header says what the payload is (kind, step, micro-batch, bucket), which weights it belongs to (incarnation of the
run, weight version) and how to check it: xxh3-64 of the payload, CRC-32 of the header itself. A weight version is the
number of optimizer steps in those weights.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash
from torch import Tensor

from diag.errors import PdtrainError

#: magic, kind, status, attempt, incarnation, version, step, micro, bucket, sequence, length, checksum, order, CRC
HEADER = struct.Struct("<4sBBHIiiiiQQQI4x")
HEADER_BYTES = 64
MAGIC = b"pdpl"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PoolError(PdtrainError):
    """The exchange between the pools cannot go on; one line that names both ranks."""

    exit_status = 1


class Damaged(ValueError):
    """A header that cannot be believed."""


class Kind(IntEnum):
    """What a message carries."""

    GRADIENTS = 1  # a bucket of gradients of one micro-batch or step
    COMMIT = 2  # JSON: every gradient of the step was accepted; how to apply them
    AFTER = 3  # JSON: what else the update rank has to do after the step: save, end
    WEIGHTS = 4  # a bucket of weights
    REPORT = 5  # JSON: the update rank's answer
    MASTERS = 6  # a bucket of FP32 weights, compute to update, once at the start of a new run
    ACK = 7  # the receiver's answer to any of these; `status` says which
    END = 8  # nothing more will come
    KEPT = 9  # the update rank's state after the step is in its file
    PING = 10  # nothing; whether the peer's process still answers


class Status(IntEnum):
    """The receiver's verdict in an ACK."""

    OK = 0
    CHECKSUM = 1  # damaged: send again
    VERSION = 2  # computed with other weights than expected: compute again
    REFUSED = 3  # as VERSION, but the policy is to leave the update out


#: What a kind is called in messages to people.
NOUNS = {
    Kind.GRADIENTS: "gradients", Kind.WEIGHTS: "weights", Kind.COMMIT: "the commit", Kind.AFTER: "the end",
    Kind.REPORT: "the report", Kind.MASTERS: "the first weights", Kind.ACK: "an answer", Kind.END: "the end",
    Kind.KEPT: "the kept state", Kind.PING: "a sign of life",
}


@dataclass(frozen=True, slots=True)
class Header:
    """See HEADER. `attempt`: how often the step's gradients were computed before. `sequence` counts what was sent,
    `order` what was handed over to be sent, from 1; 0 for what is sent again.
    """

    kind: Kind
    step: int
    version: int
    bucket: int = 0
    micro: int = 0
    attempt: int = 0
    incarnation: int = 0
    status: Status = Status.OK
    sequence: int = 0
    length: int = 0
    checksum: int = 0
    order: int = 0

    def pack(self) -> Tensor:
        """The header as 64 bytes."""
        body = HEADER.pack(
            MAGIC, self.kind, self.status, self.attempt, self.incarnation, self.version, self.step, self.micro,
            self.bucket, self.sequence, self.length, self.checksum, self.order,
        )  # fmt: skip
        return as_bytes(body + struct.pack("<I", zlib.crc32(body)))

    @classmethod
    def unpack(cls, packed: Tensor) -> Header:
        """The header in 64 bytes.

        Raises Damaged: its own checksum is wrong, so that not even the length of what follows is known.
        """
        raw = packed.numpy().tobytes()
        (crc,) = struct.unpack_from("<I", raw, 60)
        (magic, kind, status, attempt, incarnation, version, step, micro, bucket, sequence, length, checksum,
         order) = HEADER.unpack_from(raw)
        if magic != MAGIC or zlib.crc32(raw[:60]) != crc:
            raise Damaged("the header of a message is damaged")
        return cls(
            Kind(kind), step, version, bucket, micro, attempt, incarnation, Status(status), sequence, length, checksum,
            order,
        )

    @property
    def key(self) -> tuple[Kind, int, int, int]:
        """What a receiver asks for."""
        return (self.kind, self.step, self.micro, self.bucket)

    def words(self) -> str:
        """`gradients of step 12, bucket 3`."""
        return describe(self.kind, self.step, self.bucket, self.micro)

    def like(self, **changes: object) -> Header:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def describe(kind: Kind, step: int, bucket: int = 0, micro: int = 0) -> str:
    """What is sent or waited for, in words."""
    if kind not in (Kind.GRADIENTS, Kind.WEIGHTS):
        return f"{NOUNS[kind]} of step {step}"
    part = f", micro-batch {micro}" if micro else ""
    return f"{NOUNS[kind]} of step {step}{part}, bucket {bucket}"


def checksum(payload: Tensor) -> int:
    """xxh3-64 of a contiguous host tensor's bytes."""
    return xxhash.xxh3_64_intdigest(payload.view(torch.uint8).numpy().data)


def as_bytes(text: bytes) -> Tensor:
    """`text` as a payload."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
