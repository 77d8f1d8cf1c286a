"""Everything that can happen around the publication protocol in a small scope, as a graph of states.

Two engines, a trainer of one decision maker and two sending ranks, three versions, and a budget of faults:
an engine is killed (it starts again later), a trainer rank is killed, a half arrives corrupted, a request or
its answer is lost, a request arrives a second time at any later moment. Whenever one engine serves and the
other could do with its version, a refill may begin; the ranks of the source send the halves then. The
protocol is the real one (`asyncrl.control.protocol`); what engines hold and whom requests reach is modelled
here.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.control import protocol
from asyncrl.control.messages import EngineStatus, Plan
from asyncrl.control.protocol import Fleet, Refused

NAMES = ("a", "b")
NUM_RANKS = 2
OWN, MIXED = -1, -2  # weights of its own disk; partly new


class Engine(NamedTuple):
    """What an engine's process really is, whatever the coordinator knows."""

    alive: bool = True
    incarnation: int = 0
    holds: int = OWN
    paused: bool = False
    receiving: int = -1  # version; -1: nothing
    halves: frozenset[int] = frozenset()
    corrupt: bool = False


class Trainer(NamedTuple):
    """``order`` is (version, epoch, engines) from the look at the fleet to the end of the flight."""

    alive: bool = True
    dead_rank: int = -1
    phase: str = "idle"
    joining: str = ""
    order: tuple[int, int, tuple[str, ...]] = (-1, -1, ())


class State(NamedTuple):
    fleet: Fleet
    engines: tuple[Engine, ...]
    trainer: Trainer
    strays: tuple[tuple[str, tuple[int, int, tuple[str, ...]]], ...]  # requests that arrive again
    faults: int

    def key(self) -> object:
        """Equal for states with the same future: epochs and incarnations matter by comparison alone."""
        fleet, flight = self.fleet, self.fleet.flight
        epochs = {self.trainer.order[1], *(order[1] for _, order in self.strays)}
        if flight:
            epochs.add(flight.epoch)
        ranks = {epoch: rank for rank, epoch in enumerate(sorted(epochs - {fleet.epoch}), start=1)}
        ranks[fleet.epoch] = 0
        members = tuple(
            (m.status, m.version, m.plan is not None, m.num_failures, m.incarnation > 0)
            for m in fleet.members.values()
        )
        engines = tuple(
            (e.incarnation - m.incarnation, *e[2:]) if e.alive else e.incarnation - m.incarnation
            for e, m in zip(self.engines, fleet.members.values(), strict=True)
        )
        flying = flight and (
            flight.version,
            ranks[flight.epoch],
            flight.transferring,
            flight.waiting,
            flight.verified,
            frozenset(flight.failed),
            flight.source,
        )
        orders = tuple(
            (kind, version, ranks[epoch], names)
            for kind, (version, epoch, names) in (("", self.trainer.order), *self.strays)
        )
        return fleet.committed, members, flying, engines, self.trainer[:4], orders, self.faults

    def engine(self, name: str) -> Engine:
        return self.engines[NAMES.index(name)]

    def with_engine(self, name: str, **changes: object) -> State:
        idx = NAMES.index(name)
        engine = self.engines[idx]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(engines=(*self.engines[:idx], engine, *self.engines[idx + 1 :]))


def plan_of(name: str, incarnation: int) -> Plan:
    return Plan(plan_hash=f"{name}{incarnation}", manifest_hash=name)


def initial(faults: int) -> State:
    fleet = Fleet()
    for name in NAMES:
        fleet = protocol.register(fleet, name, 0)
    return State(fleet, tuple(Engine() for _ in NAMES), Trainer(), (), faults)


def steps(state: State, last_version: int) -> Iterator[tuple[str, State]]:
    """Every step that can be next, with its name."""
    yield from _trainer_steps(state, last_version)
    for name in NAMES:
        yield from _engine_steps(state, name)
    yield from _stray_steps(state)
    yield from _refill_steps(state)
    if state.faults:
        yield from _faults(state._replace(faults=state.faults - 1))
    if not state.trainer.alive and state.fleet.flight is not None and not state.fleet.flight.source:
        flight = state.fleet.flight
        aborted = protocol.abort(state.fleet, flight.version, flight.epoch, "deadline")
        cut = state._replace(fleet=aborted)
        for name in sorted(flight.waiting):
            cut = cut.with_engine(name, receiving=-1)
        yield "deadline", cut


# --- the trainer ---


def _trainer_steps(state: State, last_version: int) -> Iterator[tuple[str, State]]:
    trainer, fleet = state.trainer, state.fleet
    if not trainer.alive:
        return
    if trainer.phase == "idle":
        yield from _look(state, last_version)
    elif trainer.phase == "joining":
        yield from _join(state)
    elif trainer.phase == "prepare" and _refills(state):
        return  # PREPARE waits
    elif trainer.phase == "commit":
        yield from _request(state, "COMMIT")
    elif trainer.phase == "transfer":
        waiting = fleet.flight.waiting if fleet.flight else frozenset[str]()
        if all(state.engine(name).paused or not state.engine(name).alive for name in waiting):
            yield from _request(state, "TRANSFER")
        with contextlib.suppress(Refused):
            yield "COMMIT out of turn", _apply(state, "COMMIT", trainer.order)
    else:
        yield from _request(state, "PREPARE")


def _look(state: State, last_version: int) -> Iterator[tuple[str, State]]:
    fleet, trainer = state.fleet, state.trainer
    for name, member in fleet.members.items():
        new = member.status in (EngineStatus.JOINING, EngineStatus.SERVING) and member.plan is None
        if new or member.status is EngineStatus.QUARANTINED:
            joining = state._replace(
                fleet=protocol.rejoin(fleet, name), trainer=trainer._replace(phase="joining", joining=name)
            )
            yield f"join {name}", joining
            others = tuple(n for n, m in fleet.members.items() if m.plan is not None)
            if member.status is EngineStatus.SERVING and others and fleet.committed < last_version:
                order = (fleet.committed + 1, fleet.epoch, others)  # refilled and left out: to be refused
                yield (
                    "look: leave out",
                    state._replace(trainer=trainer._replace(phase="prepare", order=order)),
                )
            return
    serving = tuple(n for n, m in fleet.members.items() if m.status is EngineStatus.SERVING)
    ready = tuple(n for n, m in fleet.members.items() if m.status is EngineStatus.JOINING)
    if ready and fleet.committed >= 0:
        order = (fleet.committed, fleet.epoch, ready)
        yield "look: catch up", state._replace(trainer=trainer._replace(phase="prepare", order=order))
    if (serving or ready) and fleet.committed < last_version:
        order = (fleet.committed + 1, fleet.epoch, tuple(sorted(serving + ready)))
        yield "look: publish", state._replace(trainer=trainer._replace(phase="prepare", order=order))
        if serving and len(serving + ready) > 1:  # one who serves is left out: to be refused
            order = (*order[:2], tuple(sorted((serving + ready)[1:])))
            yield "look: leave out", state._replace(trainer=trainer._replace(phase="prepare", order=order))


def _join(state: State) -> Iterator[tuple[str, State]]:
    """The engine's answer, or its absence; whoever was lost or restarted meanwhile is left alone."""
    name = state.trainer.joining
    member, engine = state.fleet.member(name), state.engine(name)
    idle = state._replace(trainer=Trainer())
    joins = member.status in (EngineStatus.JOINING, EngineStatus.SERVING)
    if not joins or member.plan is not None:
        yield f"{name} was lost", idle
    elif engine.alive and engine.incarnation == member.incarnation:
        plan = plan_of(name, engine.incarnation)
        yield f"{name} joined", idle._replace(fleet=protocol.joined(state.fleet, name, plan))
    else:
        yield f"{name} did not join", idle._replace(fleet=protocol.failed(state.fleet, name, "no answer"))


NEXT_PHASE = {"PREPARE": "transfer", "TRANSFER": "commit", "COMMIT": "idle"}


def _request(state: State, kind: str) -> Iterator[tuple[str, State]]:
    """A request that is answered; or lost before or after it took effect; or that comes again later."""
    order = state.trainer.order
    try:
        after = _apply(state, kind, order)
        phase = NEXT_PHASE[kind]
        trainer = Trainer() if phase == "idle" else state.trainer._replace(phase=phase)
        answered = after._replace(trainer=trainer)
    except Refused:
        after = state
        flight = state.fleet.flight
        early = kind == "COMMIT" and flight is not None and (flight.version, flight.epoch) == order[:2]
        answered = state if early else state._replace(trainer=Trainer())
    yield kind, answered
    if state.faults:
        faults = state.faults - 1
        dead = Trainer(alive=False)
        yield f"{kind} is lost", state._replace(trainer=dead, faults=faults)
        yield f"{kind}: its answer is lost", after._replace(trainer=dead, faults=faults)
        yield f"{kind} will come again", answered._replace(strays=((kind, order),), faults=faults)


def _stray_steps(state: State) -> Iterator[tuple[str, State]]:
    for kind, order in state.strays:
        if kind == "PREPARE" and _refills(state):
            continue  # it waits
        try:
            after = _apply(state, kind, order)
        except Refused:
            after = state
        yield f"{kind} came again", after._replace(strays=())


def _apply(state: State, kind: str, order: tuple[int, int, tuple[str, ...]]) -> State:
    """What a request does to the coordinator, and through it to engines."""
    version, epoch, names = order
    fleet = state.fleet
    if kind == "PREPARE":
        plans = {name: fleet.member(name).plan or plan_of(name, -1) for name in names}
        return state._replace(fleet=protocol.prepare(fleet, version, epoch, plans))
    if kind == "COMMIT":
        return state._replace(fleet=protocol.commit(fleet, version, epoch))
    return _begin_transfer(state, version, epoch)


def _begin_transfer(state: State, version: int, epoch: int) -> State:
    state = state._replace(fleet=protocol.begin_transfer(state.fleet, version, epoch))
    for name in state.fleet.flight.waiting if state.fleet.flight else ():
        if state.engine(name).alive:
            state = state.with_engine(name, receiving=version, halves=frozenset(), holds=MIXED, corrupt=False)
    return state


# --- refills, which the coordinator drives ---


def _refills(state: State) -> bool:
    return state.fleet.flight is not None and bool(state.fleet.flight.source)


def _refill_steps(state: State) -> Iterator[tuple[str, State]]:
    fleet, flight = state.fleet, state.fleet.flight
    if flight is None or not flight.source:
        for name, source in (NAMES, NAMES[::-1]):
            if state.trainer.joining != name:  # nobody else may bring it a version meanwhile
                with contextlib.suppress(Refused):
                    yield f"refill {name}", state._replace(fleet=protocol.prepare_refill(fleet, name, source))
        return
    waits = all(state.engine(name).paused for name in flight.waiting)
    if not flight.transferring:
        given_up = protocol.abort(fleet, flight.version, flight.epoch, "no answer")
        yield "the refill is given up", state._replace(fleet=given_up)
        if flight.waiting and waits and _gives(state):
            yield f"{flight.source} gives", _begin_transfer(state, flight.version, flight.epoch)
    elif not flight.waiting:
        ended = protocol.commit(fleet, flight.version, flight.epoch)
        yield "the refill ends", state._replace(fleet=ended)


def _gives(state: State) -> bool:
    """Whether the source of the refill is still the one that it was begun with."""
    flight = state.fleet.flight
    assert flight is not None, "called for a refill"
    member, engine = state.fleet.member(flight.source), state.engine(flight.source)
    started_again = member.status is EngineStatus.JOINING or member.incarnation != engine.incarnation
    return engine.alive and not started_again and member.status is not EngineStatus.LOST


# --- engines and their owners ---


def _engine_steps(state: State, name: str) -> Iterator[tuple[str, State]]:
    engine, member, flight = state.engine(name), state.fleet.member(name), state.fleet.flight
    known = engine.incarnation == member.incarnation
    waits = flight is not None and name in flight.waiting
    if not engine.alive:
        if known and member.status is not EngineStatus.LOST:
            gone = protocol.lost(state.fleet, name, engine.incarnation, "killed")
            yield f"{name} is missed", state._replace(fleet=gone)
        if waits and known:
            gone = protocol.failed(state.fleet, name, "no answer")
            yield f"{name} does not answer", state._replace(fleet=gone)
        started = Engine(incarnation=engine.incarnation + 1)
        again = state.with_engine(name, **started._asdict())
        yield (
            f"{name} starts again",
            again._replace(fleet=protocol.register(state.fleet, name, started.incarnation)),
        )
        return
    if engine.incarnation > 0:  # a report of the start before is never too late to do harm
        late = protocol.lost(state.fleet, name, engine.incarnation - 1, "killed")
        yield f"{name} is missed late", state._replace(fleet=late)
    if not known:
        return
    if member.status is EngineStatus.PREPARED and flight and not flight.transferring and not engine.paused:
        yield f"{name} pauses", state.with_engine(name, paused=True)
    if member.status is EngineStatus.SERVING and engine.paused:
        yield f"{name} resumes", state.with_engine(name, paused=False)
    if waits and flight and engine.receiving == flight.version:
        yield from _receive(state, name)


def _receive(state: State, name: str) -> Iterator[tuple[str, State]]:
    engine, flight = state.engine(name), state.fleet.flight
    assert flight is not None, "called for an engine that receives"
    dead_rank = state.trainer.dead_rank
    senders, sent, breaks_off = set(range(NUM_RANKS)) - {dead_rank}, flight.version, dead_rank >= 0
    if flight.source:
        sent, breaks_off = state.engine(flight.source).holds, not _gives(state)
        senders = set() if breaks_off else set(range(NUM_RANKS))
    for rank in senders - engine.halves:
        arrived = engine.halves | {rank}
        holds = sent if len(arrived) == NUM_RANKS and not engine.corrupt else MIXED
        yield f"half {rank} to {name}", state.with_engine(name, halves=arrived, holds=holds)
    if len(engine.halves) == NUM_RANKS and not engine.corrupt:
        fleet = protocol.verified(state.fleet, flight.version, flight.epoch, name)
        yield f"{name} verifies", state.with_engine(name, receiving=-1)._replace(fleet=fleet)
    if engine.corrupt or breaks_off:
        counts = not flight.source or not breaks_off
        fleet = protocol.failed(state.fleet, name, "digest or deadline", counts=counts)
        yield f"{name} fails", state.with_engine(name, receiving=-1)._replace(fleet=fleet)


def _faults(state: State) -> Iterator[tuple[str, State]]:
    for name in NAMES:
        if state.engine(name).alive:
            yield f"kill {name}", state.with_engine(name, alive=False)
        if state.engine(name).halves and state.engine(name).receiving >= 0:
            yield f"corrupt {name}", state.with_engine(name, corrupt=True, holds=MIXED)
    if state.trainer.alive:
        for rank in range(NUM_RANKS):
            dead = Trainer(alive=False, dead_rank=rank)
            yield f"kill rank {rank}", state._replace(trainer=dead)


# --- what must hold ---


def broken_rules(state: State) -> list[str]:
    """Checked against what the engines really hold."""
    broken = protocol.violations(state.fleet)
    for name in NAMES:
        member, engine = state.fleet.member(name), state.engine(name)
        if not engine.alive or engine.incarnation != member.incarnation:
            continue
        if member.status is EngineStatus.SERVING and engine.holds != state.fleet.committed:
            broken.append(f"{name} serves {engine.holds}, committed is {state.fleet.committed}")
        if member.version >= 0 and engine.holds != member.version:
            broken.append(f"{name} holds {engine.holds}, the fleet believes {member.version}")
        if engine.holds == MIXED and not engine.paused:
            broken.append(f"{name} holds partly new weights and is not paused")
    return broken


def broken_step(before: State, after: State) -> list[str]:
    """Versions are committed one after the other; what is not committed has no effect on who serves."""
    old, new = before.fleet.committed, after.fleet.committed
    broken = [] if new in (old, old + 1) else [f"committed {new} after {old}"]
    statuses = [member.status for member in after.fleet.members.values()]
    if new > old and EngineStatus.SERVING not in statuses:
        broken.append(f"committed {new}, which nobody serves")
    for name in NAMES:
        was, now = before.fleet.member(name), after.fleet.member(name)
        starts_to_serve = now.status is EngineStatus.SERVING and was.status is not EngineStatus.SERVING
        if starts_to_serve and was.status is not EngineStatus.PREPARED:
            broken.append(f"{name} serves, though it was {was.status}")
        if starts_to_serve and now.version < new:
            broken.append(f"{name} begins to serve {now.version} at {new}")
    return broken


def broken_end(state: State, last_version: int) -> list[str]:
    """A state from which nothing can happen: all is published and everybody serves, or the trainer died."""
    broken = []
    if state.fleet.flight is not None:
        broken.append(f"{state.fleet.flight} never ends")
    statuses = {name: member.status for name, member in state.fleet.members.items()}
    if state.trainer.alive:
        if state.fleet.committed != last_version:
            broken.append(f"the end at version {state.fleet.committed}")
        if set(statuses.values()) != {EngineStatus.SERVING}:
            broken.append(f"the end with {statuses}")
    return broken


class Exploration(NamedTuple):
    num_states: int
    num_steps: int
    names: frozenset[str]  # of the steps
    failure: str  # with the shortest path to it; empty: none


def explore(faults: int, last_version: int) -> Exploration:
    """All states within the budget, breadth first; stops at the first broken rule."""
    gc.disable()  # hundreds of thousands of tuples, no cycles
    try:
        return _explore(faults, last_version)
    finally:
        gc.enable()


def _explore(faults: int, last_version: int) -> Exploration:
    start = initial(faults)
    seen: dict[object, tuple[object, str]] = {start.key(): (None, "start")}
    layer, num_steps, names = [(start.key(), start)], 0, set[str]()
    while layer:
        following = []
        for own, state in layer:
            try:
                successors = [(after.key(), name, after) for name, after in steps(state, last_version)]
            except Refused as refusal:  # of what an engine or its owner reports, which is never wrong here
                broken = [f"refused: {refusal}"]
                return Exploration(len(seen), num_steps, frozenset(names), _path(seen, own, broken))
            ends = all(key == own for key, _, _ in successors)
            broken = broken_end(state, last_version) if ends else []
            if broken:
                return Exploration(len(seen), num_steps, frozenset(names), _path(seen, own, broken))
            for key, name, after in successors:
                num_steps += 1
                names.add(name)
                broken = broken_step(state, after)
                if key not in seen:
                    seen[key] = (own, name)
                    following.append((key, after))
                    broken = broken or broken_rules(after)
                if broken:
                    return Exploration(len(seen), num_steps, frozenset(names), _path(seen, key, broken))
        layer = following
    return Exploration(len(seen), num_steps, frozenset(names), "")


def _path(seen: dict[object, tuple[object, str]], key: object, broken: list[str]) -> str:
    names = []
    while key is not None:
        key, name = seen[key]
        names.append(name)
    return f"{broken[0]}; after: {', '.join(reversed(names))}"
