"""A step of all whole parameters of an optimizer, over all the sets of ranks that they are sharded over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import FlatParamError, Span, Topology, streams_of
from flatparam_optim.matrices.members import Member, Presence, Settings, StateOf, StepsEachMatrix, WholeStep
from flatparam_optim.matrices.routes import HeldBlock, Matrix, Routes
from flatparam_optim.matrices.travel import Travel

Told: TypeAlias = "tuple[str, tuple[int, ...], bool, Span | None, HeldBlock | None]"
"""A rank's account of a member: name, shape, whether it has what owners keep, and what it holds of a `DTensor`."""


@final
@attrs.define(eq=False)
class MatrixStepper:
    """A matrix stepper has the whole parameters of one optimizer stepped, each once in the world if it is sharded.

    It plans at the first step, and again when parameters were added, frozen or sharded anew, or a state was loaded.
    What owners keep stays where it is.
    """

    rule: WholeStep
    _key: tuple[object, ...] = ()
    _alone: list[Member] = attrs.field(factory=list)
    _travels: list[Travel] = attrs.field(factory=list)
    _stepped_alone: int = 0
    _unread: list[Presence] = attrs.field(factory=list)
    """The messages of the ranks in the last step that was not captured, if the host has not looked at it."""

    @property
    def stepped(self) -> int:
        """How many times this rank has stepped a whole parameter, since parameters last changed."""
        return self._stepped_alone + sum(travel.stepped for travel in self._travels)

    @property
    def routes(self) -> list[Routes]:
        """The ways of the parameters that were sharded at the last step, one for each set of ranks and dtype."""
        return [travel.routes for travel in self._travels]

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[Settings],
        state_of: Callable[[Any], StateOf],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Step the parameters of `groups` that have gradients; every rank that shares them calls it.

        Args:
            groups: parameter groups, as those of `torch.optim`, of original parameters.
            state_of: the optimizer's state of one parameter.
            meanwhile: is called once, when the first matrices are on their way.

        Raises:
            FlatParamError: on every rank, if the ranks' optimizers have different parameters, or if only some ranks
                that hold a part of a parameter have its gradient. Nothing has changed then; but the host of an
                accelerator learns of such a gradient in the step after.
        """
        self.check_gradients()
        members = [Member.of(parameter, group) for group in groups for parameter in group["params"]]
        self._plan([member for member in members if member.parameter.requires_grad], state_of)
        self._check_capture()
        presences = [Presence.begin(each.members, each.topology, each.device) for each in self._travels]
        for presence in presences:
            if not presence.is_late:
                presence.check()
        for travel, presence in zip(self._travels, presences, strict=True):
            if self.rule.keeps_state:
                self._drop_others_state(travel, state_of)
            travel.run(meanwhile, presence.to_step())
            meanwhile = _nothing
        meanwhile()
        for member in self._alone:
            self._step_alone(member, state_of(member.parameter))
        late = [each for each in presences if each.is_late]
        for presence in late:
            presence.look()
        self._unread += late

    def _check_capture(self) -> None:
        """Refuse to be captured in a graph with a rule that counts steps."""
        devices = {member.parameter.device for member in self._alone}
        devices |= {travel.device for travel in self._travels}
        if "step" in self.rule.part_states and any(streams_of(each).is_capturing for each in devices):
            raise FlatParamError(
                "a step of whole parameters is being captured in a graph, but the optimizer counts its steps on the "
                "host, so that each replay would be the step with the same number: capture the passes, and call step() "
                "after each replay"
            )

    def check_gradients(self) -> None:
        """Check what the ranks told each other in the last step, if the host has not looked at it.

        Raises:
            FlatParamError: on every rank, if only some ranks that hold a part of a parameter had its gradient.
        """
        ready = [each for each in self._unread if each.may_look]
        self._unread = [each for each in self._unread if each not in ready]
        for presence in ready:
            presence.check()

    def _drop_others_state(self, travel: Travel, state_of: Callable[[Any], StateOf]) -> None:
        """Drop what only owners keep and other ranks have loaded, too: it would grow old here."""
        for member, owner in zip(travel.members, travel.routes.owners, strict=True):
            state = state_of(member.parameter) if owner != travel.place and member.parameter.numel() else {}
            for name in [name for name in state if name not in self.rule.part_states]:
                del state[name]

    @torch.no_grad()
    def first_state(self, parameter: nn.Parameter, settings: Settings) -> dict[str, Any]:
        """Return the state of `parameter` on this rank before its first step, as a step with zeros leaves it.

        What owners keep is made on the first rank that holds elements of it.
        """
        member = Member.of(parameter, settings)
        state: dict[str, Any] = {}
        part = torch.zeros_like(parameter)
        self.rule.prepare(part, torch.zeros_like(part), state, settings)
        handle = member.handle
        # An empty parameter is on no rank.
        first = None if handle is None else next(iter(handle.layout.ranks_of(member.index)), None)
        if self.rule.keeps_state and (handle is None or handle.rank == first):
            spec = member.spec
            whole = torch.empty_strided(spec.shape, spec.stride, dtype=part.dtype, device=part.device).zero_()
            of_whole: dict[str, Any] = {}
            prepared = self.rule.prepare(whole, torch.zeros_like(whole), of_whole, settings)
            self.rule.step([each.clone() for each in prepared], of_whole, settings)
            state |= {name: value for name, value in of_whole.items() if name not in self.rule.part_states}
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        return state

    def _step_alone(self, member: Member, state: StateOf) -> None:
        parameter, gradient = member.parameter, member.parameter.grad
        if gradient is None or not parameter.numel():
            return
        given, returned = self.rule.dtypes(parameter.dtype)
        prepared = self.rule.prepare(parameter, gradient, state, member.settings)
        whole = [each.clone() if each.dtype == given else each.to(given) for each in prepared]
        update = self.rule.step(whole, state, member.settings)
        self._stepped_alone += 1
        self.rule.apply(parameter, update.to(returned), tuple(parameter.shape), member.settings)

    def _plan(self, members: Sequence[Member], state_of: Callable[[Any], StateOf]) -> None:
        layouts = (None if each.handle is None else each.handle.layout for each in members)
        parameters = ((id(each.parameter), each.parameter.device, each.parameter.dtype) for each in members)
        key = (*zip(parameters, map(id, layouts), strict=True),)
        if key == self._key and self._travels + self._alone:
            # The groups may be other dicts: a loaded state brings its own.
            for travel in self._travels:
                travel.members = self._again(travel.members, members)
                travel.state_of = state_of
            self._alone = self._again(self._alone, members)
            return
        self._alone = [each for each in members if each.unit_topology is None]
        self._travels = []
        self._stepped_alone = 0
        for (topology, device, dtypes), found in _alike(members, self.rule).items():
            routes = self._routes(topology, found, self._told(topology, found, state_of))
            self._travels.append(Travel(routes, found, topology, self.rule, state_of, device, *dtypes))
        self._key = key

    def plan_anew(self) -> None:
        """Plan at the next step, since the state is a new one; every rank calls it."""
        self._key = ()

    @staticmethod
    def _again(old: Sequence[Member], members: Sequence[Member]) -> list[Member]:
        known = {id(each.parameter): each for each in members}
        found = ((each.number, known[id(each.parameter)]) for each in old)
        return [each if number is None else attrs.evolve(each, number=number) for number, each in found]

    def _told(
        self, topology: Topology, members: Sequence[Member], state_of: Callable[[Any], StateOf]
    ) -> list[list[Told]]:
        """Return for each rank what it has told the others of each of `members`; every rank calls it.

        Raises:
            FlatParamError: on every rank, if the ranks' parameters are not the same.
        """
        mine: list[Told] = []
        for member in members:
            names = state_of(member.parameter) if self.rule.keeps_state and member.parameter.numel() else ()
            has_kept = any(name not in self.rule.part_states for name in names)
            held = None if member.form is None else member.held
            mine.append((member.spec.fqn, member.spec.shape, has_kept, held, member.block))
        told = topology.exchange(mine, label="parameters that are stepped as wholes")
        _check_alike([[each[:2] for each in one] for one in told], [each[:2] for each in mine])
        return told

    def _routes(self, topology: Topology, members: Sequence[Member], told: Sequence[Sequence[Told]]) -> Routes:
        ranks = topology.shard.size
        matrices, keepers = [], []
        for number, member in enumerate(members):
            spec = member.spec
            parts = [one[number][3:] for one in told]
            if any(part != parts[place % ranks] for place, part in enumerate(parts)):
                raise FlatParamError(
                    f"{spec.fqn!r}: expected ranks that hold copies of one part of a DTensor in one place of their "
                    "replicas, found others; make one mesh with dimensions in the order (replicate, shard, tensor)"
                )
            held, blocks = _in_blocks(parts[:ranks])
            cost = self.rule.cost(spec.shape, member.settings)
            matrices.append(Matrix(spec, cost, member.spans(held), blocks, member.form is not None))
            keepers.append([place for place, one in enumerate(told) if one[number][2]])
        replicas = 1 if topology.replicate is None else topology.replicate.size
        return Routes.plan(matrices, ranks, replicas, keepers=keepers if self.rule.keeps_state else None)


def _in_blocks(told: Sequence[tuple[Span | None, HeldBlock | None]]) -> tuple[list[Span | None], tuple[HeldBlock, ...]]:
    """Return what each rank holds of a `DTensor`, counted block after block if it is cut into blocks, and these."""
    blocks = sorted({each for _, each in told if each is not None}, key=lambda each: each.offsets)
    starts = dict(zip(blocks, itertools.accumulate((each.numel for each in blocks), initial=0), strict=False))
    held = [span if block is None or span is None else span.shifted(starts[block]) for span, block in told]
    return held, tuple(blocks)


def _nothing() -> None:
    """Do nothing: it has been done."""


def _alike(
    members: Sequence[Member], rule: WholeStep
) -> dict[tuple[Topology, torch.device, tuple[torch.dtype, torch.dtype]], list[Member]]:
    """Return the sharded members that are not empty, by ranks, device and the dtypes in which they travel."""
    found: dict[tuple[Topology, torch.device, tuple[torch.dtype, torch.dtype]], list[Member]] = {}
    each_matrix = isinstance(rule, StepsEachMatrix) and rule.steps_each_matrix
    for member in members:
        if member.unit_topology is None or member.handle is None or not member.spec.numel:
            continue
        topology = member.topology()
        assert topology is not None, "its unit has one"
        dtypes = rule.dtypes(member.parameter.dtype)
        alike = found.setdefault((topology, member.handle.device, dtypes), [])
        alike += member.matrices() if each_matrix else [member]
    return found


def _check_alike(
    told: Sequence[Sequence[tuple[str, Sequence[int]]]], mine: Sequence[tuple[str, Sequence[int]]]
) -> None:
    """Refuse to step parameters, by name and shape, that are not the same on all ranks."""
    for rank, theirs in enumerate(told):
        if theirs == mine:
            continue
        both = zip(theirs, mine, strict=False)
        at = next((at for at, (one, other) in enumerate(both) if one != other), min(len(theirs), len(mine)))
        said = [f"{each[at][0]!r} of shape {each[at][1]}" if at < len(each) else "none" for each in (mine, theirs)]
        raise FlatParamError(
            f"the optimizers of the ranks step different parameters as wholes: number {at} is {said[0]} on this rank, "
            f"{said[1]} on rank {rank}; give the optimizers of all ranks the same parameters in the same order, also "
            "those of which a rank holds no element"
        )
