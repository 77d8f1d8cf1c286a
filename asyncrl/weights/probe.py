"""Fixed prompts on which an engine and the trainer compare their logprobs after a publication."""

from __future__ import annotations

import numpy as np

NUM_PROBES = 4
SHORTEST_PROBE = 24


def probe_prompts(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences of unequal length, the same in every process.

    The last id of the vocabulary is left out: SGLang reports it as 0 in the logprobs of a prompt.
    """
    generator = np.random.default_rng(20240229)
    return tuple(
        tuple(int(token) for token in generator.integers(0, vocab_size - 1, SHORTEST_PROBE + 4 * idx))
        for idx in range(NUM_PROBES)
    )
