"""The reference engine: plain transformers forwards over physical caches that shrink. It is the specification.

Batched over ragged prompts; a prompt that is sampled n times is prefilled once. Rows that have finished are frozen, and
leave the batch once they are half of it. Everything is counted per sequence, so the same prompts alone, batched or in
another order give the same tokens and traces.

It knows nothing about text, rewards or training.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.cache import EvictingCache
from rollout.engine import Rollout, SamplingConfig, check_given
from rollout.sampling import Uniforms, sample, sequence_seed
from sparse_rl.attention import NO_MASK, adopt
from sparse_rl.policies import Policy
from sparse_rl.trace import EvictionTrace

# A matrix product over 1 to 3 rows takes another kernel on a CPU and rounds otherwise; a trained model amplifies that.
LEAST_ROWS = 4


@dataclass
class Sequence_:
    """One sequence while it is sampled."""

    place: int  # in the list that generate returns
    prompt: list[int]
    seed: int
    given: list[int] = field(default_factory=list)  # the completion, where it is not to be sampled
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class HFEngine:
    """Samples with any policy from any model of the supported families.

    Parameters
    ----------
    model : a directory, or a live module (which is then sampled from as it is: no copy, no stale weights)
    policy : what the cache keeps
    dtype : of the weights when `model` is a directory
    device : where to load it; ignored for a live module
    max_batch : sequences sampled at a time
    progress : show a progress bar
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        policy: Policy,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_batch: int = 64,
        progress: bool = False,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be >= 1, got {max_batch}")
        self.shares_weights = not isinstance(model, (str, Path))
        if isinstance(model, (str, Path)):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"unknown dtype {dtype!r}; for example float32 or bfloat16")
            loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=getattr(torch, dtype))
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            self.model: PreTrainedModel = nn.Module.to(loaded, device).eval()
        else:
            self.model = model
        adopt(self.model)
        self.policy = policy
        self.max_batch = max_batch
        self.progress = progress
        self.peak_cache_bytes = 0  # of the last generate, keys and values

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Rollout]:
        """See `Engine.generate`."""
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty; a prompt needs at least one token")
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        times: Counter[tuple[int, ...]] = Counter()
        sequences: list[Sequence_] = []
        for prompt in prompts:
            key = tuple(prompt)
            for _ in range(sampling.n):
                sequences.append(Sequence_(len(sequences), list(prompt), sequence_seed(seed, key, times[key])))
                times[key] += 1  # the same prompt given twice is sampled anew
        return self._run(sequences, sampling)

    def simulate(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Rollout]:
        """See `Engine.simulate`."""
        check_given(prompts, completions)
        pairs = enumerate(zip(prompts, completions, strict=True))
        sequences = [Sequence_(i, list(prompt), 0, list(completion)) for i, (prompt, completion) in pairs]
        longest = max(map(len, completions), default=1)
        return self._run(sequences, SamplingConfig(longest, temperature=temperature, ignore_eos=True))

    def _run(self, sequences: list[Sequence_], sampling: SamplingConfig) -> list[Rollout]:
        rollouts: list[Rollout | None] = [None] * len(sequences)
        self.peak_cache_bytes = 0
        training = self.model.training
        self.model.eval()
        hidden = None if self.progress else True  # None: hidden where stderr is not a terminal
        bar = tqdm(total=len(sequences), desc="rollout", unit="seq", leave=False, disable=hidden)
        try:
            with torch.no_grad(), bar:
                for start in range(0, len(sequences), self.max_batch):
                    for sequence, trace in self._wave(sequences[start : start + self.max_batch], sampling, bar):
                        rollouts[sequence.place] = Rollout(
                            sequence.prompt,
                            sequence.tokens,
                            sequence.logprobs,
                            sequence.model_logprobs,
                            trace,
                            sequence.finish_reason,  # type: ignore[arg-type]
                        )
                        bar.update()
        finally:
            self.model.train(training)
        return rollouts  # type: ignore[return-value]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights by name; an unknown name or a wrong shape is an error."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise ValueError(f"the engine's model has no weight {name!r}")
                if own[name].shape != tensor.shape:
                    raise ValueError(f"weight {name!r} is {list(own[name].shape)}, got {list(tensor.shape)}")
                own[name].copy_(tensor)

    def close(self) -> None:
        """Let the model go."""
        del self.model

    # ---- one wave: at most max_batch sequences, from prefill to the last token --------------------------------------

    def _wave(
        self, rows: list[Sequence_], sampling: SamplingConfig, bar: tqdm
    ) -> Iterable[tuple[Sequence_, EvictionTrace]]:
        device = next(self.model.parameters()).device
        stop = self._stop_tokens(sampling)
        cache = EvictingCache(self.policy)
        filler = [Sequence_(-1, rows[0].prompt, 0, tokens=[0], finish_reason="length")] * (LEAST_ROWS - len(rows))
        rows = [*rows, *filler]
        logits = self._prefill(rows, cache, device)
        streams = [Uniforms(row.seed) for row in rows]
        for step in range(sampling.max_tokens):
            self.peak_cache_bytes = max(self.peak_cache_bytes, cache.allocated_bytes())
            if step % 32 == 0:
                bar.set_postfix(tokens=step)
            uniform = given = None
            if rows[0].given:
                given = torch.tensor([row.given[step] if step < len(row.given) else 0 for row in rows], device=device)
            elif sampling.temperature > 0:
                uniform = torch.tensor([s.at(step) for s in streams], dtype=torch.float64, device=device)
            drawn = sample(logits, sampling, uniform, given)
            tokens, logprobs, model_logprobs = (t.tolist() for t in drawn)
            for i, row in enumerate(rows):
                if row.finish_reason is not None:
                    continue
                row.tokens.append(tokens[i])
                row.logprobs.append(logprobs[i])
                row.model_logprobs.append(model_logprobs[i])
                if tokens[i] in stop:
                    row.finish_reason = "stop"
                elif len(row.tokens) == (len(row.given) or sampling.max_tokens):
                    row.finish_reason = "length"
                else:
                    continue
                yield row, self._trace(cache, i, row)

            active = [row.finish_reason is None for row in rows]
            if not any(active):
                return
            if sum(active) <= len(rows) // 2 and len(rows) > LEAST_ROWS:
                stay = sorted(range(len(rows)), key=lambda i: not active[i])[: max(sum(active), LEAST_ROWS)]
                cache.select(stay)
                streams = [streams[i] for i in stay]
                rows, active = [rows[i] for i in stay], [active[i] for i in stay]
            cache.begin_decode(active, device)
            ids = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
            positions = torch.tensor([[n - 1] for n in cache.seen], device=device)
            logits = self._logits(self._hidden(ids, positions, cache)[:, 0])

    def _prefill(self, rows: list[Sequence_], cache: EvictingCache, device: torch.device) -> torch.Tensor:
        """Prefill each distinct prompt once, fork the cache to its samples, and return the last logits [B, V]."""
        prompts = list(dict.fromkeys(tuple(row.prompt) for row in rows))
        lengths = [len(p) for p in prompts]
        width = max(LEAST_ROWS, *lengths)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        cache.begin_prefill(lengths, device)
        hidden = self._hidden(ids.to(device), torch.arange(width, device=device)[None], cache)
        last = torch.tensor(lengths, device=device) - 1
        place = {prompt: i for i, prompt in enumerate(prompts)}
        fork = [place[tuple(row.prompt)] for row in rows]
        if fork != list(range(len(prompts))):
            cache.select(fork)
        return self._logits(hidden[torch.arange(len(prompts), device=device), last][fork])

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, cache: EvictingCache) -> torch.Tensor:
        """The decoder's last hidden states [B, T, hidden] of ids [B, T]."""
        decoder = self.model.get_decoder()
        out = decoder(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=cache, use_cache=False)
        return out.last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of one position per row; no others are computed."""
        return self.model.get_output_embeddings()(hidden)

    def _stop_tokens(self, sampling: SamplingConfig) -> set[int]:
        if sampling.stop_token_ids is not None:
            return set(sampling.stop_token_ids)
        if sampling.ignore_eos:
            return set()
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        return set(eos) if isinstance(eos, (list, tuple)) else set() if eos is None else {eos}

    @staticmethod
    def _trace(cache: EvictingCache, row: int, sequence: Sequence_) -> EvictionTrace:
        return EvictionTrace.recorded(cache.evict_at(row, len(sequence.prompt) + len(sequence.tokens)))
