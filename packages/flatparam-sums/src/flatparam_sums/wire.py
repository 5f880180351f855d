"""The wire: what travels between ranks in the place of full numbers, in fewer bytes, and what that loses."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Protocol, TypeAlias, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Collectives, ContinuedPending, FlatLayout, Pending
from flatparam_runtime import FlatParamError

Format: TypeAlias = Literal["bf16", "int8", "mxfp8"]
"""A format of numbers on the wire."""


class Codec(Protocol):
    """How numbers become bytes, and become numbers again."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that numbers have before they are encoded, and after they are decoded."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many numbers."""

    def encode(self, values: Tensor, target: Tensor) -> None:
        """Write `values`, 1-D, of any floating dtype, to `target`, uint8, of `nbytes` elements."""

    def decode(self, source: Tensor, numel: int) -> Tensor:
        """Return the numbers that `source`, of `nbytes(numel)` elements of uint8, stands for."""


@final
@attrs.frozen
class Bf16:
    """Each number rounded to bfloat16: an error of at most 2**-8 of it."""

    dtype: torch.dtype = torch.bfloat16

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many numbers."""
        return 2 * numel

    def encode(self, values: Tensor, target: Tensor) -> None:
        """Write the rounded values."""
        target.view(self.dtype)[: values.numel()].copy_(values)

    def decode(self, source: Tensor, numel: int) -> Tensor:
        """Return the rounded values."""
        return source.view(self.dtype)[:numel]


@final
@attrs.frozen
class Int8:
    """Whole numbers from -127 to 127 times a float32 for each block of 256: an error of 1/254 of its largest number.

    A block with a number that is not finite is NaN.
    """

    dtype: torch.dtype = torch.float32
    block: int = 256

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many numbers: those of the factors, and one each; the next part's factors fit, too."""
        return 4 * (-(-numel // self.block) + -(-numel // 4))

    def encode(self, values: Tensor, target: Tensor) -> None:
        """Write the factors, and then the whole numbers."""
        blocks = _in_blocks(values, self.block)
        factors = target[: 4 * len(blocks)].view(torch.float32)
        factors.copy_(blocks.abs().amax(1) / 127)
        # A block of zeros has the factor 0. Of tiny numbers the factor is rounded, so the quotient may be above 127.
        quotients = (blocks / factors.unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
        target[4 * len(blocks) :][: values.numel()].view(torch.int8).copy_(quotients.view(-1)[: values.numel()])

    def decode(self, source: Tensor, numel: int) -> Tensor:
        """Return the products; in a block whose factor is not finite all are NaN."""
        count = -(-numel // self.block)
        factors = source[: 4 * count].view(torch.float32)
        factors = torch.where(factors.isfinite(), factors, torch.nan)
        values = source[4 * count :][:numel].view(torch.int8)
        return _in_blocks(values, self.block).mul_(factors.unsqueeze(1)).view(-1)[:numel]


@final
@attrs.frozen
class MxFp8:
    """MXFP8: float8 e4m3 times a power of two for each block of 32 (OCP Microscaling Formats 1.0, 2023).

    The power is the smallest by which the block's largest number is at most 448. A number has an error of at most 2**-4
    of it, or of 2**-17 of the block's largest one, if that is more. A block with a number that is not finite is NaN.
    """

    dtype: torch.dtype = torch.float32
    block: int = 32

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many numbers: one for each, and for each block."""
        return -(-numel // self.block) + numel

    def encode(self, values: Tensor, target: Tensor) -> None:
        """Write the exponents, with a bias of 127, and then the elements."""
        blocks = _in_blocks(values, self.block)
        fraction, exponent = torch.frexp(blocks.abs().amax(1))
        # 448 is 0.875 * 2**9.
        exponent = (exponent - 9 + (fraction > 0.875)).clamp_(-127, 127)
        is_finite = fraction.isfinite()
        target[: len(blocks)].copy_(torch.where(is_finite, exponent + 127, 255))
        scaled = _scaled(blocks, -exponent).clamp_(-448, 448)
        target[len(blocks) :][: values.numel()].view(torch.float8_e4m3fn).copy_(scaled.view(-1)[: values.numel()])

    def decode(self, source: Tensor, numel: int) -> Tensor:
        """Return the products."""
        count = -(-numel // self.block)
        exponent = source[:count].int() - 127
        values = _in_blocks(source[count:][:numel].view(torch.float8_e4m3fn), self.block)
        values = _scaled(values, exponent)
        return torch.where(exponent.unsqueeze(1) == 128, torch.nan, values).view(-1)[:numel]


_CODECS: Final[dict[str, Codec]] = {"bf16": Bf16(), "int8": Int8(), "mxfp8": MxFp8()}


@final
@attrs.frozen(kw_only=True)
class Wire:
    """The formats in which a unit's gradients and parameters travel; pass one as `wire` of a wrapper or `fully_shard`.

    What is received is added exactly, and rounded once, so that the order of ranks does not matter. Which rank did
    which micro-batch does, since each rank rounds what it gives.

    Attributes:
        reduce: of a rank's gradients, to the ranks that share a parameter; None sends them as they are.
        across: of the sums, to the ranks that have copies of a shard, as between the hosts of hybrid sharding; the
            default is `reduce`, and "exact" sends all of a sum.
        gather: of parameters to compute with; None sends them as they are. What is saved, summoned and updated is
            not rounded. Nothing travels, and nothing is rounded, if a rank has all of a parameter.
        error_feedback: add what a rank's rounding has lost to its next gradients; by default for formats below bf16.
            It takes 4 bytes for each element of the full parameters on each rank. See `save_residuals`.
    """

    reduce: Format | None = None
    across: Format | Literal["exact"] | None = None
    gather: Format | None = None
    error_feedback: bool | None = None

    def __attrs_post_init__(self) -> None:
        for name, more in (("reduce", ()), ("across", ("exact",)), ("gather", ())):
            found = getattr(self, name)
            if found is not None and found not in (*_CODECS, *more):
                known = ", ".join(map(repr, (*_CODECS, *more)))
                raise ValueError(f"Wire: expected {known} or None as {name}, found {found!r}")
        if self.error_feedback and not self.feeds_back:
            raise ValueError("Wire: expected reduce or across to be a format if error_feedback=True, found neither")

    @property
    def first(self) -> Codec | None:
        """Return the codec of gradients."""
        return None if self.reduce is None else _CODECS[self.reduce]

    @property
    def second(self) -> Codec | None:
        """Return the codec of sums over the ranks that share a parameter."""
        name = self.reduce if self.across is None else self.across
        return None if name is None or name == "exact" else _CODECS[name]

    @property
    def feeds_back(self) -> bool:
        """Tell whether a rank adds what its rounding has lost to its next gradients."""
        used = {each for each in (self.first, self.second) if each is not None}
        if self.error_feedback is not None:
            return self.error_feedback and bool(used)
        return any(each.dtype != torch.bfloat16 for each in used)


@final
@attrs.frozen
class WireGather:
    """The gather of full parameters through a codec; the plan of a unit has it."""

    codec: Codec
    rounds: ClassVar[bool] = True

    def gather(
        self, group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, label: str, hook: object
    ) -> Pending | None:
        """Fill `full` with the numbers that all ranks' encoded shards stand for, in the order of ranks.

        Returns:
            What to wait for; None, and nothing has happened, if the codec saves no bytes.

        Args:
            group: the ranks that share the flat parameter.
            layout: the lengths of the shards.
            full: 1-D, of the dtype that is computed in.
            shard: 1-D, this rank's; it may be a slice of `full`.
            label: names the call in errors and ledgers.
            hook: the user's function in the place of the collective.

        Raises:
            FlatParamError: if there is a hook.
        """
        codec, numels = self.codec, layout.shard_numels
        if hook is not None:
            raise FlatParamError(
                f"unit {label!r}, rank {group.rank}: expected no hook in the place of the all-gather if the wire has a "
                "format for it, found one; leave out one of the two"
            )
        if group.size == 1 or codec.nbytes(max(numels)) >= max(numels) * full.itemsize:
            return None
        nbytes = codec.nbytes(max(numels))
        received = torch.empty(group.size * nbytes, dtype=torch.uint8, device=full.device)
        mine = received[group.rank * nbytes :][:nbytes]
        if shard.numel():
            codec.encode(shard.detach(), mine[: codec.nbytes(shard.numel())])

        @torch.no_grad()
        def decode() -> None:
            begin = 0
            for rank, numel in enumerate(numels):
                if numel:
                    source = received[rank * nbytes :][: codec.nbytes(numel)]
                    full[begin : begin + numel].copy_(codec.decode(source, numel))
                begin += numel

        return ContinuedPending(group.all_gather(received, mine, label=label), decode)


def encoded(codec: Codec, values: Tensor, numels: list[int]) -> Tensor:
    """Return the bytes of each rank's part of `values`, end to end; `numels` are the lengths of the parts."""
    sizes = [codec.nbytes(numel) for numel in numels]
    target = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
    for part, bytes_of in zip(torch.split(values, numels), torch.split(target, sizes), strict=True):
        if part.numel():
            codec.encode(part, bytes_of)
    return target


def decoded(codec: Codec, source: Tensor, numels: list[int]) -> Tensor:
    """Return the numbers that `encoded` has made bytes of."""
    parts = zip(torch.split(source, [codec.nbytes(numel) for numel in numels]), numels, strict=True)
    return torch.cat([codec.decode(part, numel) for part, numel in parts if numel])


def codec_of(format: Format) -> Codec:
    """Return the codec of a format."""
    return _CODECS[format]


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return the values in float32, in rows of `block`, the last one filled up with zeros; never the same memory."""
    count = -(-values.numel() // block)
    rows = torch.zeros(count * block, dtype=torch.float32, device=values.device)
    rows[: values.numel()].copy_(values)
    return rows.view(count, block)


def _scaled(rows: Tensor, exponent: Tensor) -> Tensor:
    """Multiply each row by two to its exponent, in place, in two steps, since the factor may be no float32."""
    half = torch.div(exponent, 2, rounding_mode="floor")
    for each in (half, exponent - half):
        # The bits of the power: a function of the device may round it.
        rows.mul_(((each.int() + 127) << 23).view(torch.float32).unsqueeze(1))
    return rows
