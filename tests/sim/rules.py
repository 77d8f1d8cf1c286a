"""What must hold of every history, whatever the schedule and the faults; no code of the rollouter is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from asyncrl.engines.scripted import scripted_logprob, scripted_token
from asyncrl.types import FinishReason, Sample
from tests.sim.parts import STOP_TOKENS, VOCAB, History, Prompts, true_reward


def violations(history: History) -> list[str]:
    """One line per broken rule, the first of each rule; empty for a good history."""
    rules = (
        prompts_in_order,
        bounded_starts,
        whole_batches,
        every_group_once,
        same_again,
        equal_shares,
        bounded_staleness,
        right_tokens,
        right_rewards,
        trained_in_order,
        drained_is_empty,
        closed_books,
    )
    return [f"{rule.__name__}: {first}" for rule in rules if (first := next(rule(history), None))]


def prompts_in_order(history: History) -> Iterator[str]:
    """Every prompt is issued once, in order, none skipped, over all lives."""
    issued = [group_id for group_id, _, _ in history.starts]
    if issued != list(range(len(issued))):
        yield f"issued {issued}"


def bounded_starts(history: History) -> Iterator[str]:
    """Never more groups than batches 0 .. version + max_staleness have places."""
    size, bound = history.settings.groups_per_batch, history.settings.max_staleness
    for num_before, (group_id, version, num_dropped) in enumerate(history.starts):
        if num_before + 1 - num_dropped > (version + bound + 1) * size:
            yield f"group {group_id}, with {num_dropped} dropped, is one too many at version {version}"


def whole_batches(history: History) -> Iterator[str]:
    """Every batch is full, every place holds one group with all of its samples."""
    settings = history.settings
    for position in range((settings.num_batches or 0) * settings.groups_per_batch):
        groups = set()
        for sample_idx in range(settings.samples_per_group):
            puts = history.puts.get((position, sample_idx), [])
            if not puts:
                yield f"sample {sample_idx} of position {position} was never put"
            groups |= {sample.group_id for _, sample in puts}
        if len(groups) != 1:
            yield f"position {position} holds the groups {groups}"


def every_group_once(history: History) -> Iterator[str]:
    """A started group is trained at one position or dropped, never both, never neither."""
    places = {(position, puts[0][1].group_id) for (position, _), puts in history.puts.items()}
    trained = Counter(group_id for _, group_id in places)
    for group_id, _, _ in history.starts:
        ends = trained[group_id] + history.dropped.count(group_id)
        if ends != 1:
            yield f"group {group_id} ended {ends} times"


def same_again(history: History) -> Iterator[str]:
    """What is put again after a restart is what was put before, bit for bit, in the same ring."""
    for (position, sample_idx), puts in history.puts.items():
        for ring_idx, sample in puts[1:]:
            if ring_idx != puts[0][0] or _bytes(sample) != _bytes(puts[0][1]):
                yield f"sample {sample_idx} of position {position} changed"


def equal_shares(history: History) -> Iterator[str]:
    """Each ring gets the same number of groups of each batch."""
    settings = history.settings
    shares: Counter[tuple[int, int]] = Counter()
    for (position, sample_idx), puts in history.puts.items():
        if sample_idx == 0:
            shares[position // settings.groups_per_batch, puts[0][0]] += 1
    for where, count in shares.items():
        if count != settings.groups_per_batch // settings.num_rings:
            yield f"(batch, ring) {where} got {count} groups"


def bounded_staleness(history: History) -> Iterator[str]:
    """No token is older than the bound when its batch is trained, none comes from the future."""
    for (position, sample_idx), puts in history.puts.items():
        batch_idx, sample = position // history.settings.groups_per_batch, puts[0][1]
        if batch_idx - sample.min_version > history.settings.max_staleness or sample.min_version < 0:
            yield f"sample {sample_idx} of batch {batch_idx} has version {sample.min_version}"
        if sample.max_version > batch_idx:
            yield f"sample {sample_idx} of batch {batch_idx} has version {sample.max_version}"


def right_tokens(history: History) -> Iterator[str]:
    """Any schedule of cuts gives the tokens of an uncut greedy run, each with its version's logprob."""
    for (position, sample_idx), puts in history.puts.items():
        sample = puts[0][1]
        expected, finish = uncut(sample.group_id, history.settings.max_new_tokens)
        where = f"sample {sample_idx} at position {position}"
        if sample.token_ids.tolist() != expected or sample.finish_reason is not finish:
            yield f"{where}: {sample.token_ids.tolist()} {sample.finish_reason}, uncut {expected} {finish}"
        for i in range(sample.num_prompt_tokens, sample.num_tokens):
            version = int(sample.policy_versions[i])
            if np.float32(scripted_logprob(int(sample.token_ids[i]), version)) != sample.behav_logprobs[i]:
                yield f"{where}: token {i} says version {version}, its logprob is of another"


def right_rewards(history: History) -> Iterator[str]:
    """Every sample has its own reward and its siblings', none the substitute of a failed one."""
    n = history.settings.samples_per_group
    for (position, sample_idx), puts in history.puts.items():
        siblings = [history.puts[position, idx][0][1] for idx in range(n)]
        rewards = [true_reward(s.token_ids[s.num_prompt_tokens :].tolist()) for s in siblings]
        sample = puts[0][1]
        if sample.reward != rewards[sample_idx] or sample.group_rewards.tolist() != rewards:
            yield f"sample {sample_idx} at position {position}: {sample.group_rewards}, deserved {rewards}"


def trained_in_order(history: History) -> Iterator[str]:
    """Batch b is trained at version b; after a restart some again, none left out."""
    highest = -1
    for batch_idx, version in history.trained:
        if batch_idx != version or batch_idx > highest + 1:
            yield f"batch {batch_idx} at version {version} after batch {highest}"
        highest = max(highest, batch_idx)


def drained_is_empty(history: History) -> Iterator[str]:
    """A publication that drains finds no request in any engine."""
    yield from history.leaks


def closed_books(history: History) -> Iterator[str]:
    """In the end every issued sample is acknowledged or dropped."""
    counts, n = history.counts, history.settings.samples_per_group
    trained = (history.settings.num_batches or 0) * history.settings.groups_per_batch * n
    if (counts.issued, counts.acknowledged) != (len(history.starts) * n, trained):
        yield f"{counts}, {len(history.starts)} groups of {n} were started"
    if counts.num_dropped != len(history.dropped) * n or counts.accounted != counts.issued:
        yield f"{counts}, {len(history.dropped)} groups of {n} were dropped"


def uncut(group_id: int, max_new_tokens: int) -> tuple[list[int], FinishReason]:
    """Prompt and completion of one uninterrupted greedy request."""
    tokens = list(Prompts().prompt_at(group_id).token_ids)
    for _ in range(max_new_tokens):
        tokens.append(scripted_token(tokens, 0, None, vocab_size=VOCAB))
        if tokens[-1] in STOP_TOKENS:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def _bytes(sample: Sample) -> bytes:
    arrays = (
        sample.token_ids,
        sample.loss_mask,
        sample.behav_logprobs,
        sample.policy_versions,
        sample.group_rewards,
    )
    return b"|".join(array.tobytes() for array in arrays) + repr(sample.reward).encode()
