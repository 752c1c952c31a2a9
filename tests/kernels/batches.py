"""Random batches as Model Runner V2 lays them out: requests in slots, ragged queries, drafts, padding."""

from dataclasses import dataclass

import numpy as np
import torch

SLOTS, MAX_LEN = 8, 96


@dataclass(frozen=True)
class Batch:
    """What the kernels share. Lengths are per request of the batch; `requests` maps them to slots."""

    rng: np.random.Generator
    requests: torch.Tensor
    query_start: torch.Tensor
    cu_logits: torch.Tensor
    computed: torch.Tensor
    prefill_len: torch.Tensor
    prompt_len: torch.Tensor
    total_len: torch.Tensor
    tokens: torch.Tensor
    steps: int
    vocab: int

    @property
    def size(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def num_logits(self) -> int:
        return int(self.cu_logits[-1])

    @property
    def expanded(self) -> torch.Tensor:
        counts = self.cu_logits[1:] - self.cu_logits[:-1]
        return torch.repeat_interleave(self.requests, counts)

    @property
    def local(self) -> torch.Tensor:
        counts = (self.cu_logits[1:] - self.cu_logits[:-1]).tolist()
        return torch.cat([torch.arange(n, dtype=torch.int32) for n in counts])

    @property
    def seq_lens(self) -> torch.Tensor:
        lens = torch.zeros(SLOTS, dtype=torch.int32)
        lens[: self.size] = self.computed[self.requests] + self.query_start[1:] - self.query_start[:-1]
        return lens

    @property
    def positions(self) -> torch.Tensor:
        rows = [
            torch.arange(n) + self.computed[slot]
            for n, slot in zip((self.query_start[1:] - self.query_start[:-1]).tolist(), self.requests, strict=True)
        ]
        return torch.cat(rows).to(torch.int64)

    def ints(
        self, shape: int | tuple[int, ...], low: int = 0, high: int | None = None, dtype=torch.int32
    ) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(low, high or self.vocab, shape)).to(dtype)

    def logits(self, rows: int | tuple[int, ...], vocab: int, dtype=torch.float32) -> torch.Tensor:
        """Logits with a row of each kind: ordinary, peaked, flat, mostly masked, extreme, all masked."""
        shape = (*((rows,) if isinstance(rows, int) else rows), vocab)
        values = self.rng.normal(size=shape) * 3
        flat = values.reshape(-1, vocab)
        for row in range(len(flat)):
            kind = self.rng.integers(0, 7)
            if kind == 1:
                flat[row, self.rng.integers(0, vocab)] += 40
            elif kind == 2:
                flat[row] = 1.5
            elif kind == 3:
                flat[row, self.rng.random(vocab) < 0.95] = -np.inf
                flat[row, self.rng.integers(0, vocab)] = 0.0
            elif kind == 4:
                flat[row] *= 1e4
        return torch.from_numpy(values).to(dtype)


def batch(seed: int, *, steps: int = 3, vocab: int = 61, decoding: bool = False) -> Batch:
    """A batch of 1 to 6 requests, each in prefill, at its end, or decoding with 0 to `steps` drafts."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 7))
    requests = torch.from_numpy(rng.permutation(SLOTS)[:size]).to(torch.int32)
    prompt = torch.from_numpy(rng.integers(2, 30, SLOTS)).to(torch.int32)
    written = torch.from_numpy(rng.integers(0, 20, SLOTS)).to(torch.int32)
    prefill = prompt + torch.from_numpy(rng.integers(0, 2, SLOTS)).to(torch.int32) * written
    computed = torch.zeros(SLOTS, dtype=torch.int32)
    queries, logits = [], []
    for slot in requests.tolist():
        drafts = int(rng.integers(0, steps + 1))
        if decoding or rng.random() < 0.6:
            computed[slot] = prefill[slot] + int(rng.integers(0, 10))
            queries.append(1 + drafts)
            logits.append(1 + drafts)
        else:
            computed[slot] = int(rng.integers(0, int(prefill[slot])))
            queries.append(int(rng.integers(1, int(prefill[slot] - computed[slot]) + 1)))
            logits.append(1)
    cumulative = [torch.from_numpy(np.concatenate(([0], np.cumsum(x)))).to(torch.int32) for x in (queries, logits)]
    return Batch(
        rng,
        requests,
        cumulative[0],
        cumulative[1],
        computed,
        prefill,
        prompt,
        torch.maximum(prefill, computed + 1),
        torch.from_numpy(rng.integers(0, vocab, (SLOTS, MAX_LEN))).to(torch.int32),
        steps,
        vocab,
    )
