"""Slow references of every cache policy, one sequence and one token at a time, in Python loops and float64.

Written from the papers' equations, not from the tensor code: nothing of the package is imported here. A `Life` steps
through a sequence, holds a list of positions per kv head, and evicts when the cache holds budget + period entries (or
at the end of a prompt that is at least that long). The queries and keys are given, so no model is needed.

A life can follow a recorded trace. Where the record drops other entries than the reference would, the scores of the
differing entries must be equal up to a relative 1e-5, since the record was made in float32 and the reference is in
float64. The life counts this as a flip, and goes on from the recorded eviction. Any other difference raises a
`Disagreement`.

A policy's reference is a subclass of `Life` with `scores` and the method's `defaults`, and one line in REFERENCES;
docs/extending.md has the other steps.
"""

from __future__ import annotations

import cmath
import math
from operator import mul
from typing import Any

import torch

NEVER = 2**30
TIE = 1e-5  # relative; closer scores than this may rank either way in float32


class Disagreement(AssertionError):
    """The recorded trace drops an entry that the reference keeps by a clear margin."""


class Life:
    """One sequence in one layer, from its prompt to its last token.

    query, key : [Hq, S, D] and [Hkv, S, D], for all S positions
    parameters : parameters of the policy; missing ones take the default of the method
    recorded : evict_at [Hkv, S] to follow; None means to use the reference alone
    """

    defaults: dict[str, Any] = {"sinks": 0, "window": 0, "period": 1}

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        prompt: int,
        scaling: float,
        parameters: dict[str, Any],
        recorded: torch.Tensor | None = None,
    ) -> None:
        self.q, self.k = query.double().tolist(), key.double().tolist()
        self.prompt, self.scaling = prompt, scaling
        self.length, self.kv_heads, self.group = key.shape[1], key.shape[0], query.shape[0] // key.shape[0]
        self.recorded = None if recorded is None else recorded.tolist()
        self.set(**{**self.defaults, **parameters})
        self.held: list[list[int]] = [[] for _ in range(self.kv_heads)]
        self.evict_at = [[NEVER] * self.length for _ in range(self.kv_heads)]
        self.flips = 0
        self.now = -1  # the position of the last query
        self._logits: dict[tuple[int, int, int], float] = {}
        self._cosines: dict[tuple[int, int, int], float] = {}

    def set(self, **parameters: Any) -> None:
        self.budget = parameters.get("budget")
        self.sinks, self.window, self.period = parameters["sinks"], parameters["window"], parameters["period"]
        self.parameters = parameters

    # ---- the life -----------------------------------------------------------------------------------------------

    def run(self) -> torch.Tensor:
        """Run the sequence to its end. Returns evict_at, int32 [Hkv, S]: q + 1 for an entry dropped after query q."""
        for position in range(self.length):
            for held in self.held:
                held.append(position)
            self.now = position
            self.attended()
            in_prompt = position < self.prompt - 1
            if not in_prompt and self.due():
                self.compact()
        return torch.tensor(self.evict_at, dtype=torch.int32)

    def due(self) -> bool:
        return self.budget is not None and len(self.held[0]) >= self.budget + self.period

    def compact(self) -> None:
        scores = self.scores()
        for kv in range(self.kv_heads):
            competing = self.competing(kv)
            room = self.budget - (len(self.held[kv]) - len(competing))
            ranked = sorted(competing, key=lambda j: (-scores[kv][j], j))  # a tie: the earlier position ranks better
            dropped = set(ranked[room:])
            if self.recorded is not None:
                dropped = self.follow(kv, dropped, scores[kv])
            for j in dropped:
                self.evict_at[kv][j] = self.now + 1
            self.held[kv] = [j for j in self.held[kv] if j not in dropped]
        self.compacted()

    def follow(self, kv: int, dropped: set[int], scores: dict[int, float]) -> set[int]:
        """Return the entries that the record drops now; only entries of equal scores may differ from `dropped`."""
        recorded = {j for j in self.held[kv] if self.recorded[kv][j] == self.now + 1}
        if recorded == dropped:
            return dropped
        where = f"kv head {kv} after query {self.now}: recorded {sorted(recorded)}, reference {sorted(dropped)}"
        swapped = recorded ^ dropped
        if len(recorded) != len(dropped) or not swapped <= set(scores):
            raise Disagreement(where)
        values = {j: scores[j] for j in sorted(swapped)}
        if max(values.values()) - min(values.values()) > TIE * max(map(abs, values.values())):
            raise Disagreement(f"{where}, their scores {values}")
        self.flips += 1
        return recorded

    # ---- methods that a policy defines --------------------------------------------------------------------------

    def scores(self) -> list[dict[int, float]]:
        """Return, for each kv head, the score of every competing position."""
        raise NotImplementedError

    def attended(self) -> None:
        """Update the state after a query, of prompt or decode, has attended and before any eviction."""

    def compacted(self) -> None:
        """Update the state after a compaction; called after every compaction."""

    # ---- parts ----------------------------------------------------------------------------------------------------

    def competing(self, kv: int) -> list[int]:
        """Return the held positions that are neither sinks nor among the `window` most recent tokens."""
        return [j for j in self.held[kv] if self.sinks <= j <= self.now - self.window]

    def heads(self, kv: int) -> range:
        return range(kv * self.group, (kv + 1) * self.group)

    def logit(self, head: int, query: int, j: int) -> float:
        place = (head, query, j)
        if place not in self._logits:
            self._logits[place] = self.scaling * sum(map(mul, self.q[head][query], self.k[head // self.group][j]))
        return self._logits[place]

    def attention(self, head: int, query: int) -> dict[int, float]:
        """Return softmax(q K^T scaling) of one query over the held positions that are not after the query."""
        seen = [j for j in self.held[head // self.group] if j <= query]
        logits = [self.logit(head, query, j) for j in seen]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        total = sum(weights)
        return {j: w / total for j, w in zip(seen, weights, strict=True)}

    def fused_attention(self, kv: int) -> dict[int, list[float]]:
        """Return, for each competing position, the attention of the window's queries, maximised over the group."""
        fused: dict[int, list[float]] = {j: [] for j in self.competing(kv)}
        for query in range(self.now - self.window + 1, self.now + 1):
            by_head = [self.attention(head, query) for head in self.heads(kv)]
            for j, values in fused.items():
                values.append(max(a[j] for a in by_head))
        return fused

    def local(self, kv: int) -> dict[int, float]:
        """Return the local score S_j = mean_w max_g A of each competing position j: the attention A, maximised over the
        group's heads g and averaged over the window's queries w (G-KV eqs. 1-2)."""
        return {j: sum(values) / self.window for j, values in self.fused_attention(kv).items()}

    def cosine(self, kv: int, i: int, j: int) -> float:
        place = (kv, i, j)
        if place not in self._cosines:
            a, b = self.k[kv][i], self.k[kv][j]
            norms = math.sqrt(sum(map(mul, a, a))) * math.sqrt(sum(map(mul, b, b)))
            self._cosines[place] = sum(map(mul, a, b)) / norms
        return self._cosines[place]

    def redundancy(self, kv: int) -> dict[int, float]:
        """Return the redundancy R (R-KV eqs. 4-6) of held positions: the softmax of mean similarities to the others."""
        held = self.held[kv]
        total = dict.fromkeys(held, 0.0)
        for i in held:
            similar = {j: self.cosine(kv, i, j) for j in held if j != i}
            similar = {j: value for j, value in similar.items() if value >= 0.5}
            if similar:
                del similar[max(similar)]  # the most recent similar entry represents the others
            for j, value in similar.items():
                total[j] += value
        weights = {j: math.exp(value / len(held)) for j, value in total.items()}
        return {j: weight / sum(weights.values()) for j, weight in weights.items()}


def max_pool(scores: dict[int, float], kernel: int) -> dict[int, float]:
    """Return, for each entry, the maximum over `kernel` neighbouring entries; `scores` are in order of position."""
    positions, reach = list(scores), kernel // 2
    return {j: max(scores[i] for i in positions[max(n - reach, 0) : n + reach + 1]) for n, j in enumerate(positions)}


def over_max(scores: dict[int, float]) -> dict[int, float]:
    """Return S_j / max_i S_i, the score S_j of each entry j divided by the largest score."""
    top = max(scores.values())
    return {j: value / top if top else 0.0 for j, value in scores.items()}


# ---- the policies ---------------------------------------------------------------------------------------------------


class Full(Life):
    """It has no budget, and never evicts an entry."""


class Streaming(Life):
    """StreamingLLM §3.2 keeps the sinks (4) and the most recent tokens."""

    defaults = {"sinks": 4, "window": 0, "period": 1}

    def scores(self) -> list[dict[int, float]]:
        return [{j: float(j) for j in self.competing(kv)} for kv in range(self.kv_heads)]


class H2O(Life):
    """H2O §4 scores entry j by F_j, the attention of all queries so far to j, summed over the group's query heads."""

    def set(self, **parameters: Any) -> None:
        window = parameters["window"]
        super().set(**{**parameters, "window": parameters["budget"] // 2 if window is None else window})
        self.mass: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]

    defaults = {"sinks": 0, "window": None, "period": 1}

    def attended(self) -> None:
        for kv in range(self.kv_heads):
            for head in self.heads(kv):
                for j, weight in self.attention(head, self.now).items():
                    self.mass[kv][j] = self.mass[kv].get(j, 0.0) + weight

    def scores(self) -> list[dict[int, float]]:
        return [{j: self.mass[kv][j] for j in self.competing(kv)} for kv in range(self.kv_heads)]


class Lined(H2O):
    """LuKA §3.1 keeps the sinks, the window and the other tokens with the highest accumulated attention, whose number
    is a fraction of the prompt's length (§4.2)."""

    defaults = {"sinks": 0, "window": 128, "period": 8, "compression": 8, "of": "seen"}

    @property
    def budget(self) -> int:  # type: ignore[override]
        fixed = self.sinks + self.window
        counted = self.prompt if self.parameters["of"] == "prompt" else max(0, self.now + 1 - fixed)
        return fixed + counted // self.parameters["compression"]

    @budget.setter
    def budget(self, value: Any) -> None:
        assert value is None
        self.last = 0  # tokens seen at the last compaction

    def due(self) -> bool:
        """Return True at the usual first compaction and then after every `period` tokens, though the budget grows."""
        return self.now + 1 - self.last >= self.period if self.last else super().due()

    def compacted(self) -> None:
        self.last = self.now + 1


class Tova(Life):
    """TOVA §3.2 scores an entry by the last query's attention, averaged over all heads of the layer."""

    def scores(self) -> list[dict[int, float]]:
        heads = self.kv_heads * self.group
        by_head = [self.attention(head, self.now) for head in range(heads)]
        mean = {j: sum(a[j] for a in by_head) / heads for j in self.competing(0)}
        return [mean] * self.kv_heads


class MorphKV(Life):
    """MorphKV scores an entry by the local score alone."""

    defaults = {"sinks": 0, "window": 16, "period": 128}

    def scores(self) -> list[dict[int, float]]:
        return [self.local(kv) for kv in range(self.kv_heads)]


class SnapKV(Life):
    """SnapKV eq. 4, applied at decode time, scores an entry by the local score, max-pooled over 7 entries."""

    defaults = {"sinks": 0, "window": 16, "period": 128, "pooling": 7}

    def scores(self) -> list[dict[int, float]]:
        return [max_pool(self.local(kv), self.parameters["pooling"]) for kv in range(self.kv_heads)]


class RKV(Life):
    """R-KV eq. 7 scores an entry by l I - (1 - l) R with l = 0.1, where I is the local score, max-pooled over 7
    entries, and R the redundancy; neither is normalised."""

    defaults = {"sinks": 0, "window": 16, "period": 128, "lam": 0.1, "pooling": 7}

    def scores(self) -> list[dict[int, float]]:
        lam = self.parameters["lam"]
        result = []
        for kv in range(self.kv_heads):
            importance = max_pool(self.local(kv), self.parameters["pooling"])
            redundancy = self.redundancy(kv)
            result.append({j: lam * value - (1 - lam) * redundancy[j] for j, value in importance.items()})
        return result


class GKV(Life):
    """G-KV eqs. 3-5 and appendix D score an entry by the global score F; redundancy and pooling are options."""

    defaults = {"sinks": 0, "window": 16, "period": 128, "form": "max", "alpha": 0.8}
    defaults |= {"redundancy": True, "lam": 0.7, "pooling": 1}

    def set(self, **parameters: Any) -> None:
        super().set(**parameters)
        self.history: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]

    def merge(self, history: float | None, local: float) -> float:
        alpha = self.parameters["alpha"]
        if history is None:  # a new entry, or one of the old window
            return local
        match self.parameters["form"]:
            case "max":
                return max(alpha * history, local)
            case "mean":
                return alpha * history + (1 - alpha) * local
            case "sum":
                return alpha * history + local

    def scores(self) -> list[dict[int, float]]:
        lam = self.parameters["lam"]
        result = []
        for kv in range(self.kv_heads):
            local = over_max(self.local(kv))
            merged = {j: self.merge(self.history[kv].get(j), value) for j, value in local.items()}
            self.history[kv] = merged  # before pooling and redundancy
            score = max_pool(merged, self.parameters["pooling"])
            if self.parameters["redundancy"]:
                every = self.redundancy(kv)
                repeated = over_max({j: every[j] for j in score})
                score = {j: lam * value - (1 - lam) * repeated[j] for j, value in score.items()}
            result.append(score)
        return result

    def compacted(self) -> None:
        for kv, held in enumerate(self.held):
            self.history[kv] = {j: value for j, value in self.history[kv].items() if j in held}


class CAKE(Life):
    """CAKE's attention shift, as G-KV compares it, is S + gamma Var_w max_g A: the local score S plus gamma times the
    population variance over the window's queries w of the attention A, maximised over the group's heads g."""

    defaults = {"sinks": 0, "window": 16, "period": 128, "gamma": 200.0}

    def scores(self) -> list[dict[int, float]]:
        result = []
        for kv in range(self.kv_heads):
            score = {}
            for j, values in self.fused_attention(kv).items():
                mean = sum(values) / self.window
                variance = sum((value - mean) ** 2 for value in values) / self.window
                score[j] = mean + self.parameters["gamma"] * variance
            result.append(score)
        return result


class AM(Life):
    """Attention Matching, section 3, scores an entry by the root mean square of the attention that the last queries
    give to the entry, biases included.

    At a compaction, the logarithm of a weight w_j >= 0 is added to the bias of each kept entry j. With logits l_j, the
    weights make sum_j w_j exp(l_j) near the mass of all competing entries, for each of the last queries. The weights
    are fitted from the best single weight, by 30 steps of accelerated projected gradient descent within exp(+-3).
    """

    defaults = {"sinks": 0, "window": 16, "period": None, "reference_queries": None}

    def set(self, **parameters: Any) -> None:
        period = parameters["period"] or parameters["budget"]
        super().set(**{**parameters, "period": period})
        self.asked = parameters["reference_queries"] or min(128, parameters["budget"] + period)
        self.bias: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]
        self.features: list[list[dict[int, float]]] = []

    def scores(self) -> list[dict[int, float]]:
        self.features, result = [], []
        for kv in range(self.kv_heads):
            rows = []
            for head in self.heads(kv):
                for query in range(self.now - self.asked + 1, self.now + 1):  # without a causal mask
                    logits = {j: self.logit(head, query, j) + self.bias[kv].get(j, 0.0) for j in self.competing(kv)}
                    top = max(logits.values())
                    rows.append({j: math.exp(x - top) for j, x in logits.items()})
            self.features.append(rows)
            shares = [{j: value / sum(row.values()) for j, value in row.items()} for row in rows]
            result.append({j: math.sqrt(sum(s[j] ** 2 for s in shares) / len(shares)) for j in self.competing(kv)})
        return result

    def compacted(self) -> None:
        for kv, rows in enumerate(self.features):
            stay = [j for j in rows[0] if j in self.held[kv]]
            for j, weight in zip(stay, self.weights([[row[j] for j in stay] for row in rows], rows), strict=True):
                self.bias[kv][j] = self.bias[kv].get(j, 0.0) + math.log(weight)

    def weights(self, kept: list[list[float]], rows: list[dict[int, float]]) -> list[float]:
        mass, count = [sum(row.values()) for row in rows], len(kept[0])
        columns = [[row[i] for row in kept] for i in range(count)]
        gram = [[sum(map(mul, a, b)) for b in columns] for a in columns]
        wanted = [sum(map(mul, a, mass)) for a in columns]
        totals = [sum(row) for row in kept]
        flat = sum(map(mul, totals, mass)) / sum(map(mul, totals, totals))
        direction = [1.0] * count
        for _ in range(12):
            direction = [sum(map(mul, row, direction)) for row in gram]
            norm = math.sqrt(sum(map(mul, direction, direction)))
            direction = [x / norm for x in direction]
        greatest = math.sqrt(sum(sum(map(mul, row, direction)) ** 2 for row in gram))
        weights = ahead = [min(max(flat, math.exp(-3)), math.exp(3))] * count
        momentum = 1.0
        for _ in range(30):
            slopes = [sum(map(mul, row, ahead)) - b for row, b in zip(gram, wanted, strict=True)]
            moved = [x - slope / (1.02 * greatest) for x, slope in zip(ahead, slopes, strict=True)]
            following = [min(max(x, math.exp(-3)), math.exp(3)) for x in moved]
            later = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = [x + (momentum - 1) / later * (x - y) for x, y in zip(following, weights, strict=True)]
            weights, momentum = following, later
        return weights


class TriAttention(Life):
    """TriAttention scores entry j by the expected logits of future queries q at the positions n + d, d = 1, 2, 4, ...,
    where n tokens were seen: sum_f |E q_f| |k_f| cos(w_f (n + d - j) + arg E q_f - arg k_f), averaged over d, plus
    sum_f (1 - R_f) E|q_f| |k_f| with R_f = |E q_f| / E|q_f|. These are divided by their deviation from their mean over
    the competing entries, and maximised over the query heads of a kv head.

    queries : queries before RoPE, [Hq][T][D], over which the expectations E are taken
    frequencies : w_f, [D / 2]
    """

    defaults = {"sinks": 0, "window": 0, "period": 128, "horizon": 65536}

    def set(self, **parameters: Any) -> None:
        super().set(**parameters)
        self.frequencies = parameters["frequencies"]
        half = len(self.frequencies)
        self.mean, self.size = [], []
        for queries in parameters["queries"]:
            as_pairs = [[complex(q[f], q[f + half]) for f in range(half)] for q in queries]
            self.mean.append([sum(x[f] for x in as_pairs) / len(queries) for f in range(half)])
            self.size.append([sum(abs(x[f]) for x in as_pairs) / len(queries) for f in range(half)])

    def expected(self, head: int, j: int) -> float:
        key, half, score = self.k[head // self.group][j], len(self.frequencies), 0.0
        distances = [2**n for n in range(64) if 2**n <= self.parameters["horizon"]]
        for f, frequency in enumerate(self.frequencies):
            unturned = complex(key[f], key[f + half]) * cmath.exp(-1j * frequency * j)
            angle = cmath.phase(self.mean[head][f]) - cmath.phase(unturned)
            waves = [math.cos(frequency * (self.now + 1 + d - j) + angle) for d in distances]
            concentration = abs(self.mean[head][f]) / self.size[head][f]
            score += abs(self.mean[head][f]) * abs(unturned) * sum(waves) / len(waves)
            score += (1 - concentration) * self.size[head][f] * abs(unturned)
        return score

    def scores(self) -> list[dict[int, float]]:
        result = []
        for kv in range(self.kv_heads):
            by_head = []
            for head in self.heads(kv):
                scores = {j: self.expected(head, j) for j in self.competing(kv)}
                mean = sum(scores.values()) / len(scores)
                deviation = math.sqrt(sum((x - mean) ** 2 for x in scores.values()) / len(scores))
                by_head.append({j: (x - mean) / max(deviation, 1e-6) for j, x in scores.items()})
            result.append({j: max(scores[j] for scores in by_head) for j in self.competing(kv)})
        return result


REFERENCES: dict[str, type[Life]] = {
    "full": Full,
    "streaming": Streaming,
    "h2o": H2O,
    "lined": Lined,
    "tova": Tova,
    "snapkv": SnapKV,
    "morphkv": MorphKV,
    "rkv": RKV,
    "gkv": GKV,
    "cake": CAKE,
    "am": AM,
    "triattention": TriAttention,
}
