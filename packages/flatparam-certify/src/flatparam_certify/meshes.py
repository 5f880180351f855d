"""The mesh that ranks stand on: its sizes, and which ranks have data of their own. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, final

import attrs

DIMENSIONS: Final = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""The dimensions of each mesh, the outermost first; those of size 1 are there, too."""
OF_DATA: Final = ("dp_replicate", "dp_shard", "ep")
"""The dimensions whose ranks have batches of their own. Along the others, all ranks have the same batch."""


@final
class CertifyError(RuntimeError):
    """A case, an engine or a mesh that cannot be used; the message says why, and what to do."""


@final
@attrs.frozen
class MeshSizes:
    """The size of each dimension, and the ranks in row-major order.

    Attributes:
        sizes: the number of ranks along each of `DIMENSIONS`.
        of_data: the dimensions whose ranks have batches of their own.
        is_shrunk: whether it is another one with groups of one rank.
    """

    sizes: tuple[int, ...] = (1,) * len(DIMENSIONS)
    of_data: tuple[str, ...] = OF_DATA
    is_shrunk: bool = False

    @classmethod
    def of(cls, sizes: Mapping[str, int], of_data: tuple[str, ...] = OF_DATA) -> MeshSizes:
        """Return the mesh with these sizes; the other dimensions have size 1.

        Raises:
            CertifyError: for a dimension that is unknown, or a size below 1.
        """
        for name in (*sizes, *of_data):
            if name not in DIMENSIONS:
                raise CertifyError(f"mesh: expected dimensions of {', '.join(DIMENSIONS)}, found {name!r}; rename it")
        for name, size in sizes.items():
            if size < 1:
                raise CertifyError(
                    f"mesh: expected at least 1 rank along {name}, found {size}; leave it out, or give 1"
                )
        return cls(tuple(sizes.get(name, 1) for name in DIMENSIONS), tuple(of_data))

    @classmethod
    def read(cls, text: str, of_data: tuple[str, ...] = OF_DATA) -> MeshSizes:
        """Return the mesh of a text such as `dp_shard=2,tp=2`.

        Raises:
            CertifyError: if the text is none.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if not number.strip().isdecimal() or name in sizes:
                raise CertifyError(
                    f"mesh: expected NAME=SIZE,... with each name once, found {part!r}; write dp_shard=2,tp=2"
                )
            sizes[name.strip()] = int(number)
        return cls.of(sizes, of_data)

    def __getitem__(self, name: str) -> int:
        """Return the size of a dimension."""
        return self.sizes[DIMENSIONS.index(name)]

    def __str__(self) -> str:
        """Return the dimensions above 1, as `read` takes them; of a single rank, `1 rank`."""
        return ",".join(f"{name}={self[name]}" for name in self.long) or "1 rank"

    @property
    def long(self) -> tuple[str, ...]:
        """Return the dimensions with more than one rank."""
        return tuple(name for name in DIMENSIONS if self[name] > 1)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Return the number of batches of a micro-batch."""
        return math.prod(self[name] for name in self.of_data)

    @property
    def shows_no_sync(self) -> bool:
        """Return whether every reduction is one of gradients: no rank computes a part of the model, or of a batch."""
        only_data = all(self[name] == 1 for name in DIMENSIONS if name not in ("dp_replicate", "dp_shard"))
        return only_data and self.data_ranks > 1 and not self.is_shrunk

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank along each dimension."""
        found = {}
        for name in reversed(DIMENSIONS):
            rank, found[name] = divmod(rank, self[name])
        return found

    def data_rank(self, rank: int) -> int:
        """Return the number of the batches that a rank has."""
        place, number = self.coordinates(rank), 0
        for name in DIMENSIONS:
            if name in self.of_data:
                number = number * self[name] + place[name]
        return number

    def along(self, name: str, rank: int) -> list[int]:
        """Return the ranks of the group of `rank` along a dimension."""
        place = self.coordinates(rank)
        del place[name]
        return [
            other
            for other in range(self.ranks)
            if all(self.coordinates(other)[key] == value for key, value in place.items())
        ]

    def shrunk(self) -> Iterator[MeshSizes]:
        """Yield the meshes in which one of the long dimensions, or all of them, have a group of one rank."""
        seen = {self.sizes}
        for names in (*((name,) for name in self.long), self.long):
            sizes = tuple(1 if name in names else size for name, size in zip(DIMENSIONS, self.sizes, strict=True))
            mesh = attrs.evolve(self, sizes=sizes, is_shrunk=True)
            if sizes not in seen:
                seen.add(sizes)
                yield mesh

    def named(self, factor: float, micro_batches: int) -> str:
        """Return what a factor could be: `the size of dp_shard`, `2`; empty if it is none that anybody would expect."""
        numbers = {f"the size of {name}": self[name] for name in self.long}
        if micro_batches > 1:
            numbers["the number of micro-batches"] = micro_batches
        if len(self.long) > 1:
            numbers["the number of ranks"] = self.ranks
            if self.data_ranks not in (1, self.ranks):
                numbers["the number of data ranks"] = self.data_ranks
        if micro_batches > 1 and self.data_ranks > 1:
            numbers["data ranks times micro-batches"] = micro_batches * self.data_ranks
        for power, shown in (
            (1, "{}"),
            (-1, "1/{}"),
            (2, "{} squared"),
            (-2, "1/({} squared)"),
            (0.5, "the root of {}"),
            (-0.5, "1/(the root of {})"),
        ):
            fitting = [name for name, number in numbers.items() if abs(factor / number**power - 1) < 1e-4]
            if fitting:
                return " or ".join(shown.format(name) for name in fitting)
        return ""
