"""What a publication costs by each strategy: the bound that no transfer beats, and the plan's own time.

    Moves of one engine, number of replicas, links -> Estimate per strategy -> the cheapest

A link moves ``bandwidth`` bytes a second in each direction; a round of messages begins ``latency`` after the
one before has been posted. Three strategies over the same moves:

* p2p: every sender sends every replica its bytes;
* broadcast: a bucket leaves its sender once and goes from replica to replica, in chunks;
* relay: each replica gets a stripe of a bucket, and the replicas exchange the stripes.

The bound: the fullest receiver's bytes, or the bytes that only a set of ranks holds over their links, times
the copies that they must send; and the latency of the first byte. The simulation adds up rounds: a round
lasts as long as its fullest link; the first bucket is packed and the last one unpacked while links are idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrl.weights.moves import Messages, Moves, message_rounds, pairs_of
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.tables import Ints
from asyncrl.weights.wire import chunk_bytes

Strategy = Literal["p2p", "broadcast", "relay"]
STRATEGIES: tuple[Strategy, ...] = ("p2p", "broadcast", "relay")
PREFERENCE = 1.05
"""An earlier strategy is chosen up to this many times the cheapest one's time: its engines fail alone."""
LARGEST_BUCKET = 256 << 20
SMALLEST_MESSAGE = 1 << 20
"""A pair that has less per round sends in fewer rounds."""
COPY_BANDWIDTH = 1e12
"""Bytes a second at which a bucket is packed or unpacked: a fifth of what an H200's memory moves."""
HOP_S = 5e-6
"""Seconds after which a rank can pass on what it has received, where the next one waits for it."""


@dataclass(frozen=True, slots=True)
class Links:
    """Of every rank: bytes per second each way, and seconds before a round's first byte."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """One strategy's cost; ``bucket_bytes`` is the most that any link moves in a round."""

    strategy: Strategy
    bound_s: float
    simulated_s: float
    num_rounds: int
    bucket_bytes: int
    num_communicators: int
    max_peers: int

    @property
    def staging_bytes(self) -> int:
        """Two buckets, on either side."""
        return 2 * self.bucket_bytes


@dataclass(frozen=True, slots=True, eq=False)
class EngineTraffic:
    """One engine's traffic, the same for every replica; pairs are in the order of `moves.pairs_of`."""

    pair_sender: Ints
    pair_receiver: Ints
    pair_bytes: Ints
    sent: Ints  # bytes by trainer rank
    received: Ints  # bytes by engine rank
    skew: float  # inherent imbalance of sending

    @staticmethod
    def of(moves: Moves, num_senders: int, num_receivers: int, skew: float) -> EngineTraffic:
        """What the moves of one engine mean for its links."""
        pair, num_pairs = pairs_of(moves)
        sender, receiver, totals = (np.zeros(num_pairs, dtype=np.int64) for _ in range(3))
        sender[pair], receiver[pair] = moves.sender, moves.receiver
        np.add.at(totals, pair, moves.num_bytes)
        sent, received = np.zeros(num_senders, dtype=np.int64), np.zeros(num_receivers, dtype=np.int64)
        np.add.at(sent, sender, totals)
        np.add.at(received, receiver, totals)
        return EngineTraffic(sender, receiver, totals, sent, received, skew)

    @property
    def send_balance(self) -> float:
        """The most that a trainer rank sends, over the mean."""
        return float(self.sent.max() / self.sent.mean())

    def fullest_link(self, copies: int) -> int:
        """Bytes, where every sender sends ``copies`` of what it sends one engine."""
        return int(max(self.sent.max() * copies, self.received.max()))


def estimate(traffic: EngineTraffic, num_replicas: int, links: Links, strategy: Strategy) -> Estimate:
    """The cost by one strategy, of messages that are all equal parts of their pair's bytes."""
    counts = message_counts(traffic, num_replicas, links, strategy)
    pair, number, when = message_rounds(counts)
    totals = traffic.pair_bytes[pair]
    sizes = totals * (number + 1) // counts[pair] - totals * number // counts[pair]
    sender, receiver = traffic.pair_sender[pair], traffic.pair_receiver[pair]
    return _priced(traffic, num_replicas, links, strategy, (sender, receiver, when, sizes))


def simulate(
    traffic: EngineTraffic, num_replicas: int, links: Links, strategy: Strategy, messages: Messages
) -> Estimate:
    """The cost of the very messages of a plan."""
    columns = (messages.sender, messages.receiver, messages.round, messages.num_bytes)
    return _priced(traffic, num_replicas, links, strategy, columns)


def message_counts(traffic: EngineTraffic, num_replicas: int, links: Links, strategy: Strategy) -> Ints:
    """Messages of each pair: one per round, as many rounds as make the best of latency and of staging.

    With n rounds of the fullest link's P bytes, latency costs n alpha, first and last copy 2 P / (n C): the
    best bucket P / n is sqrt(P alpha C / 2), but not above ``LARGEST_BUCKET``.
    """
    fullest = traffic.fullest_link(_copies(strategy, num_replicas))
    bucket = min(LARGEST_BUCKET, math.isqrt(int(fullest * links.latency * COPY_BANDWIDTH / 2)) + 1)
    return np.clip(traffic.pair_bytes // SMALLEST_MESSAGE, 1, -(-fullest // bucket))


def _copies(strategy: Strategy, num_replicas: int) -> int:
    return num_replicas if strategy == "p2p" else 1


def _priced(
    traffic: EngineTraffic,
    num_replicas: int,
    links: Links,
    strategy: Strategy,
    messages: tuple[Ints, Ints, Ints, Ints],
) -> Estimate:
    """The cost of (sender, receiver, round, bytes) of every message."""
    copies = _copies(strategy, num_replicas)
    loads = _round_loads(traffic, messages, copies)
    largest = int(loads.max())
    seconds = float(loads.sum()) / links.bandwidth + len(loads) * links.latency
    seconds += 2 * largest / COPY_BANDWIDTH + _fill(strategy, num_replicas, largest, links)
    inherent = traffic.skew * float(traffic.sent.mean()) * copies
    bound = max(float(traffic.received.max()), inherent) / links.bandwidth
    bound += _least_latency(strategy, num_replicas, links)
    communicators, peers = _connections(traffic, num_replicas, strategy)
    return Estimate(strategy, bound, seconds, len(loads), largest, communicators, peers)


def choose(estimates: Sequence[Estimate]) -> Estimate:
    """The first that costs hardly more than the cheapest."""
    cheapest = min(item.simulated_s for item in estimates)
    return next(item for item in estimates if item.simulated_s <= PREFERENCE * cheapest)


def cheapest_strategy(plan: TransferPlan, num_replicas: int, links: Links) -> Strategy:
    """For engines of one plan, by the times of messages of the best size."""
    traffic = EngineTraffic.of(plan.moves, len(plan.senders), len(plan.receivers), skew=1.0)
    return choose([estimate(traffic, num_replicas, links, name) for name in STRATEGIES]).strategy


def _round_loads(traffic: EngineTraffic, messages: tuple[Ints, Ints, Ints, Ints], copies: int) -> Ints:
    """The bytes of the fullest link in every round."""
    sender, receiver, when, num_bytes = messages
    num_rounds = int(when.max()) + 1
    fullest = np.zeros(num_rounds, dtype=np.int64)
    for port, num_ports, factor in (
        (sender, len(traffic.sent), copies),
        (receiver, len(traffic.received), 1),
    ):
        loads = np.zeros(num_rounds * num_ports, dtype=np.int64)
        np.add.at(loads, when * num_ports + port, num_bytes * factor)
        fullest = np.maximum(fullest, loads.reshape(num_rounds, num_ports).max(axis=1))
    return fullest


def _least_latency(strategy: Strategy, num_replicas: int, links: Links) -> float:
    """Seconds before the last replica can have its first byte: once copied, a byte may be passed on by all
    who have it; a relayed one travels twice."""
    if strategy == "broadcast":
        return links.latency + math.ceil(math.log2(num_replicas)) * HOP_S
    return 2 * links.latency if strategy == "relay" and num_replicas > 1 else links.latency


def _fill(strategy: Strategy, num_replicas: int, bucket: int, links: Links) -> float:
    """Seconds until the last replica has what the first round brought, beyond the round itself."""
    if strategy == "broadcast":
        return (num_replicas - 1) * (HOP_S + min(bucket, chunk_bytes(bucket)) / links.bandwidth)
    if strategy == "relay" and num_replicas > 1:
        return links.latency + bucket / num_replicas / links.bandwidth
    return 0.0


def _connections(traffic: EngineTraffic, num_replicas: int, strategy: Strategy) -> tuple[int, int]:
    """Communicators of all, and the most peers of any rank."""
    of_sender = int(np.bincount(traffic.pair_sender).max()) * num_replicas
    of_receiver = int(np.bincount(traffic.pair_receiver).max())
    num_ranks = len(traffic.received)
    if strategy == "p2p":
        return num_replicas, max(of_sender, of_receiver)
    others = min(num_replicas - 1, 2) if strategy == "broadcast" else num_replicas - 1
    return num_ranks + num_replicas, max(of_sender, of_receiver + others)
