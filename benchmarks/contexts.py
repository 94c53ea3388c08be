"""Contexts that are compacted once: how near methods stay to a full cache, at several sizes of the compacted cache.

    OMP_NUM_THREADS=1 python benchmarks/contexts.py one_shot MODEL...     # --small tests that it runs

MODEL is a model of stories (stories260K, for one_shot, cartridges and methods_stories) or a model trained by
retrieval/short and retrieval/sft, with one seed each (the other studies). Rows are means over contexts, with the
standard error; seconds are CPU seconds of one thread for one context: reading, reference queries and compaction.
Results are in benchmarks/results/STUDY.json.

one_shot             KL(full cache || compacted cache) per token, in nats, on the rest of a story of the model's own
cartridges           the same, and contexts trained by gradient descent (arXiv 2506.06266)
methods_stories      the paper's methods, with its settings (section 4, appendix B.3): a model tells the continuations
                     of a story from those of three others by their log-probs. nll is that of the full cache's answers
methods_retrieval    the same methods; facts are looked up in documents, each asked for alone
retrieval, retrieval_fifty, retrieval_once    facts by many methods: 20 stated 17 times, 50 stated 7, 100 stated once
trained_after        facts before and after retrieval/compacted, and after as many steps with whole documents; MODEL is
                     trained by retrieval/short

Head budgets come from sensitivity curves over other contexts (algorithm 4, rollout/context/budgets.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import pandas
import torch
from torch import Tensor

from benchmarks.results import HOUSE, RESULTS, Rows, write
from rollout import SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig, budgets
from rollout.context.cartridge import Cartridge, beginning, train
from rollout.context.config import CartridgeConfig
from rollout.context.reader import ContextPrompts, Conversation, Reader
from sparse_rl.commands.train import train as run_recipe
from sparse_rl.data.synthetic import ASKED, Retrieval
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_tokenizer
from sparse_rl.recipe import load_recipe

Settings = Mapping[str, Any]
FULL, NONE = {"policy": "full"}, {"policy": "none"}
BEGINNINGS = ("He", "She", "They", "One day")  # from which self-study continues

# ---- tasks ----------------------------------------------------------------------------------------------------------


class Task:
    """Contexts, and a judgement of a compacted context. settings : of all compactions of its contexts"""

    contexts: list[list[int]]
    prompts: ContextPrompts
    settings: Settings

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.reader = Reader(engine, ContextPrompts())

    def scores(self, number: int, context: Context) -> dict[str, float]:
        """Return measures of a compaction of context `number`. The last one is the loss for head budgets."""
        raise NotImplementedError

    def loss(self, number: int, context: Context) -> float:
        return list(self.scores(number, context).values())[-1]

    @torch.no_grad()
    def logprobs(self, context: Context, texts: Sequence[list[int]]) -> Tensor:
        """Return the log-probs of the next token after each token of texts, float64 [texts, length, V]."""
        return torch.stack(self.reader.logits(texts, self.reader.cache(context))).double().log_softmax(-1)

    def stories(self, tokens: int, count: int, seed: int) -> list[list[int]]:
        sampling = SamplingConfig(tokens - 1, n=count, seed=seed, ignore_eos=True)
        return [
            [*r.prompt_ids, *r.completion_ids] for r in self.engine.generate([[self.tokenizer.bos_token_id]], sampling)
        ]

    def whole(self, number: int) -> Context:
        return self.engine.compact(self.contexts[number], PromptCacheConfig(**FULL))


class Rest(Task):
    """Stories of 288 tokens, of which 192 are a context, and the others are judged."""

    def __init__(self, engine: Any, tokenizer: Any, count: int, seed: int) -> None:
        super().__init__(engine, tokenizer)
        texts = self.stories(288, count, seed)
        self.contexts, self.behind = [t[:192] for t in texts], [t[192:] for t in texts]
        begins = [tokenizer.encode(text, add_special_tokens=False) for text in BEGINNINGS]
        self.prompts = ContextPrompts(requests=begins)
        self.settings = {"first": 1, "last": 4, "study_samples": 4, "study_tokens": 96}
        self.full = [self.logprobs(self.whole(n), [rest])[0] for n, rest in enumerate(self.behind)]

    def scores(self, number: int, context: Context) -> dict[str, float]:
        full, own = self.full[number], self.logprobs(context, [self.behind[number]])[0]
        return {"KL": float((full.exp() * (full - own)).sum(-1).mean())}


class Stories(Task):
    """Stories of 240 tokens, and 8 continuations of each, which the model has sampled with the full cache."""

    def __init__(self, engine: Any, tokenizer: Any, count: int, seed: int) -> None:
        super().__init__(engine, tokenizer)
        self.contexts = self.stories(240, count, seed)
        sampling = SamplingConfig(25, n=8, seed=seed + 1, ignore_eos=True)
        self.answers = [[r.completion_ids for r in engine.generate([tokens], sampling)] for tokens in self.contexts]
        begins = [tokenizer.encode(text, add_special_tokens=False) for text in BEGINNINGS]

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [list(answer[place : place + 8]) for place in range(0, min(len(answer), 24), 8)]

        self.prompts = ContextPrompts(requests=begins, questions=begins[0], starters=starters)
        self.settings = {"first": 1, "last": 4, "study_samples": 4, "study_tokens": 96, "most_queries": 2048}

    def scores(self, number: int, context: Context) -> dict[str, float]:
        nlls = []
        for step in range(4):  # an answer's first token is not judged
            answers = self.answers[(number + step) % len(self.contexts)]
            following = torch.tensor(answers)[:, 1:, None]
            nlls.append(-self.logprobs(context, answers)[:, :-1].gather(2, following)[..., 0].mean(1))
        right = (torch.stack(nlls).argmin(0) == 0).double().mean()
        return {"accuracy": float(right), "nll": float(nlls[0].mean())}


class Facts(Task):
    """Documents with facts, and a question about each fact, whose answer is one token.

    own : True gives the NLL of the full cache's answers, otherwise that of the right answers
    """

    def __init__(self, engine: Any, tokenizer: Any, count: int, split: str, task: Retrieval, own: bool) -> None:
        super().__init__(engine, tokenizer)
        self.contexts, self.questions, self.answers = [], [], []
        begins = tokenizer.encode(ASKED)
        for row in task.rows(split, count, 0, True):
            document, first = row["prompt"].split(f" {ASKED} ")
            asked = tokenizer.encode(first + row["completion"])
            self.contexts.append(tokenizer.encode(document))
            self.questions.append([[*begins, name] for name in asked[::2]])
            self.answers.append(torch.tensor(asked[1::2]))

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [[*begins, answer[place]] for place in range(0, min(len(answer), 6), 2)]  # facts are (name, digit)

        self.prompts = ContextPrompts(requests=[begins])
        if own:
            self.prompts = ContextPrompts(requests=[begins], questions=begins, starters=starters)
        tokens = 2 * task.facts  # self-study asks one question per fact
        self.settings = {"first": 1, "study_samples": 4, "study_tokens": tokens, "most_queries": 1024}
        self.judged = self.answers
        if own:
            self.judged = [self.said(n, self.whole(n)).argmax(-1) for n in range(count)]

    def said(self, number: int, context: Context) -> Tensor:
        return self.logprobs(context, self.questions[number])[:, -1]

    def scores(self, number: int, context: Context) -> dict[str, float]:
        logprobs = self.said(number, context)
        right = (logprobs.argmax(-1) == self.answers[number]).double().mean()
        return {"accuracy": float(right), "nll": -float(logprobs.gather(1, self.judged[number][:, None]).mean())}


# ---- methods --------------------------------------------------------------------------------------------------------

BOTH = {"queries": ["self_study", "repeat"]}
OWN = {"queries": ["context"], "select": "omp"}
REPEAT, OMP, STUDIED = {"queries": ["repeat"]}, {**BOTH, "select": "omp"}, {"queries": ["self_study"]}
MEAN, MAXIMUM = ({"policy": "evict", "aggregate": name} for name in ("mean", "max"))
SNAPKV = {**MEAN, "queries": ["window"], "window": 32, "pool": 5}
EVICTIONS: dict[str, Settings] = {
    "nothing": NONE,
    "evict, mean, context (H2O)": {**MEAN, "queries": ["context"]},
    "evict, maximum, repeat (KVzip)": {**MAXIMUM, **REPEAT},
    "evict, SnapKV": SNAPKV,
    "evict, PyramidKV": {**SNAPKV, "heads": "pyramid"},
    "evict, mean": {**MEAN, **BOTH},
    "evict, maximum": {**MAXIMUM, **BOTH},
    "evict, root mean square": {"policy": "evict", **BOTH},
}
ONE_SHOT: dict[str, Settings] = {
    **EVICTIONS,
    "am": BOTH,
    **{f"am, {n} parts": {**BOTH, "chunk": 188 // n} for n in (2, 4)},
    **{f"am, {n} parts, read alone": {**BOTH, "chunk": 188 // n, "chunking": "text"} for n in (2, 4)},
    "am, on-policy": {**BOTH, "on_policy": True},
    **{f"am, {query}": {"queries": [query]} for query in ("repeat", "context", "random")},
    "am, the paper's solvers": {**BOTH, "fit": "paper"},
    "am, omp": OMP,
    "am, omp, repeat": {**REPEAT, "select": "omp"},
    "am, omp, on-policy": {**OMP, "on_policy": True},
    "am, omp_fast": {**BOTH, "select": "omp_fast"},
    "am, omp_fast, on-policy": {**BOTH, "select": "omp_fast", "on_policy": True},
    "am, omp, the paper's solvers": {**OMP, "fit": "paper"},
    "am, head budgets": {**BOTH, "budgets": BOTH},
    "evict, root mean square, head budgets": {"policy": "evict", **BOTH, "budgets": {"policy": "evict", **BOTH}},
}
RETRIEVAL: dict[str, Settings] = {
    "full cache": FULL,
    **EVICTIONS,
    "evict, maximum, self-study": {**MAXIMUM, **STUDIED},
    "evict, root mean square, self-study": {"policy": "evict", **STUDIED},
    "am": BOTH,
    "am, omp": OMP,
    "am, omp, self-study": {**STUDIED, "select": "omp"},
}
RETRIEVAL |= {
    f"{name}, head budgets": {**RETRIEVAL[name], "budgets": RETRIEVAL[name]}
    for name in ("evict, root mean square", "evict, maximum, self-study", "am", "am, omp")
}
POLICY = {**BOTH, "on_policy": True}
QUESTION = {**MEAN, "queries": ["question"], "pool": 7, "pooling": "max"}
METHODS: dict[str, Settings] = {
    "full cache": FULL,
    "nothing": NONE,
    "AM-OMP": {**POLICY, "select": "omp", "budgets": OMP},
    "AM-OMP, equal heads": {**POLICY, "select": "omp"},
    "AM-OMP-fast": {**POLICY, "select": "omp_fast", "budgets": OMP},
    "AM-OMP-fast, equal heads": {**POLICY, "select": "omp_fast"},
    "AM-HighestAttnKeys": {**POLICY, "budgets": BOTH},
    "AM-HighestAttnKeys, equal heads": POLICY,
    "AM-HighestAttnKeys-fast": {**REPEAT, "budgets": BOTH},
    "H2O+": {**MEAN, "queries": ["context"]},
    "SnapKV": QUESTION,
    "PyramidKV": {**QUESTION, "heads": "pyramid"},
    "KVzip": {**MAXIMUM, **REPEAT, "heads": "global"},
    "KVzip, equal heads": {**MAXIMUM, **REPEAT},
    "head partition (DuoAttention)": {"policy": "evict", "queries": ["context"], "heads": "partition", "budgets": BOTH},
    "Cartridges": {"policy": "cartridge", "study_samples": 24, "cartridge": CartridgeConfig(steps=100, batch=8)},
}


@dataclass(frozen=True)
class Study:
    """A table.

    task : function from engine, tokenizer, seed and "evaluation" or "calibration" to contexts
    sizes : share of a context's entries -> name of the column; `calibrated` is that for which head budgets are measured
    seeds : number of repetitions with each model
    """

    methods: Mapping[str, Settings]
    task: Callable[..., Task]
    sizes: Mapping[float, str]
    calibrated: float = 0.1
    seeds: int = 1

    def rows(self, model: str, only: str, small: bool) -> Rows:
        engine = make_engine("hf", model=model_directory(model), policy="full", max_batch=128)
        made, rows = (engine, load_tokenizer(model_directory(model))), Rows()
        for seed in range(1 if small else self.seeds):
            judged, calibration = (self.task(*made, seed, split) for split in ("evaluation", "calibration"))
            for name, settings in self.methods.items():
                if only in name:
                    measured_rows = self.measured(engine, settings, judged, calibration, small)
                    rows += [{"method": name, "model": Path(model).name, "seed": seed, **row} for row in measured_rows]
                    print(rows[-1], flush=True)
        return rows

    def measured(self, engine: Any, settings: Settings, judged: Task, calibration: Task, small: bool) -> Rows:
        """Return a row for each context and size. A method that chooses no entries has one size."""
        shares, rows = None, Rows()
        if "budgets" in settings:
            config = configured(calibration, self.calibrated, settings["budgets"])
            studied = [engine.study(tokens, config, calibration.prompts) for tokens in calibration.contexts]
            curves = budgets.sensitivity(studied, config, calibration.loss, base=self.calibrated)
            shares = budgets.allocate(curves, budgets.RATIOS, self.calibrated)
        for number, tokens in list(enumerate(judged.contexts))[: 1 if small else None]:
            start = time.process_time()
            studied = engine.study(tokens, configured(judged, max(self.sizes), settings), judged.prompts)
            reading = time.process_time() - start
            for ratio, label in self.sizes.items():
                config, counts = configured(judged, ratio, settings), None
                if shares is not None and settings.get("heads") == "partition":
                    counts = budgets.partition(shares, ratio, config.between(len(tokens)))
                elif shares is not None:
                    counts = budgets.counts(shares, ratio, len(tokens), config)
                start = time.process_time()
                context = studied.compacted(config, counts)
                seconds = reading + time.process_time() - start
                rows.append({"size": label, "context": number, **judged.scores(number, context), "seconds": seconds})
                if not config.sized:
                    break
        return rows


def configured(task: Task, ratio: float, settings: Settings) -> PromptCacheConfig:
    own = {name: value for name, value in settings.items() if name != "budgets" and value != "partition"}
    return PromptCacheConfig(ratio=ratio, **{**task.settings, **own})


# ---- cartridges -----------------------------------------------------------------------------------------------------


class Trained(Study):
    """Cartridges as large as compactions, trained on 124 texts of self-study beside the judged ones; in each step Adam
    lowers KL(full cache || cartridge) on four of them. Their learning rates were the best of 0.01, 0.03, 0.1 and 0.3 on
    three other contexts.
    """

    rates = {"the first entries": 0.1, "am": 0.01}

    def rows(self, model: str, only: str, small: bool) -> Rows:
        rows = super().rows(model, only, small)
        engine = make_engine("hf", model=model_directory(model), policy="full")
        engine.model.requires_grad_(False)
        task = self.task(engine, load_tokenizer(model_directory(model)), 0, "evaluation")
        reader = Reader(engine, task.prompts)
        for number, tokens in list(enumerate(task.contexts))[: 1 if small else None]:
            start = time.process_time()
            whole = engine.study(tokens, configured(task, 0.1, {"queries": ["context"]})).whole
            sampling = SamplingConfig(96, n=8 if small else 128, seed=1001 + number, ignore_eos=True)
            answers = [rollout.completion_ids for rollout in engine.generate([tokens], sampling)]
            texts = [Conversation(answer[:1], answer[1:]) for answer in answers]
            read = time.process_time() - start
            for (ratio, label), (name, rate) in ((a, b) for a in self.sizes.items() for b in self.rates.items()):
                start = time.process_time()
                began = beginning(whole, round(ratio * 187), 1, 4)
                if name == "am":
                    began = engine.compact(tokens, configured(task, ratio, BOTH), task.prompts)
                settings = CartridgeConfig(steps=2 if small else 300, batch=4, rate=rate)
                cartridge = Cartridge(began, 5)
                for step in train(cartridge, whole, texts, settings, reader):
                    if step in (2 if small else 100, 300):
                        seconds = read + time.process_time() - start
                        row = {"method": f"cartridge from {name}, {step} steps", "size": label, "context": number}
                        rows.append({**row, **task.scores(number, cartridge.context()), "seconds": seconds})
        return rows


class TrainedAfter(Study):
    """A model before and after distillations that differ in `prompt_cache`, each with three seeds."""

    arms: Mapping[str, tuple[str, ...]] = {"compacted contexts": (), "whole contexts": ("prompt_cache=null",)}

    def rows(self, model: str, only: str, small: bool) -> Rows:
        model = model_directory(model)
        rows, steps = self.of_model("before", 0, model, small), ("max_steps=2",) if small else ()
        for seed in range(1 if small else self.seeds):
            for name, keys in self.arms.items():
                place = HOUSE / f"runs/contexts/{name}, {seed}"
                own = f"model={model}", f"seed={seed}", f"data.synthetic.seed={seed + 1}", f"output_dir={place}"
                recipe = load_recipe("retrieval/compacted", [*own, "disable_tqdm=true", *keys, *steps])
                trained = place / "model" if (place / "model").exists() else run_recipe(recipe)
                rows += self.of_model(f"trained with {name}", seed, str(trained), small)
        return rows

    def of_model(self, name: str, seed: int, model: str, small: bool) -> Rows:
        engine, rows = make_engine("hf", model=model_directory(model), policy="full", max_batch=128), Rows()
        task = self.task(engine, load_tokenizer(model_directory(model)), 0, "evaluation")
        for method, settings in self.methods.items():
            measured = pandas.DataFrame(self.measured(engine, settings, task, task, small))
            means = measured.groupby("size")[["accuracy", "nll"]].agg("mean").reset_index().to_dict("records")
            rows += [{"method": f"{name}: {method}", "seed": seed, "contexts": len(measured), **row} for row in means]
        print(name, seed, pandas.DataFrame(rows).groupby(["method", "size"]).accuracy.mean(), flush=True)
        return rows


def rest(count: int, calibration: int) -> Callable[..., Task]:
    return lambda engine, tokenizer, seed, split: Rest(
        engine, tokenizer, *((count, 1) if split == "evaluation" else (calibration, 101))
    )


def stories(engine: Any, tokenizer: Any, seed: int, split: str) -> Task:
    return Stories(engine, tokenizer, *((4, 100 * seed + 1) if split == "evaluation" else (2, 100 * seed + 51)))


def facts(count: int, calibration: int, *shape: int, own: bool = False) -> Callable[..., Task]:
    return lambda engine, tokenizer, seed, split: Facts(
        engine, tokenizer, count if split == "evaluation" else calibration, split, Retrieval(*shape), own
    )


KEPT = {kept / 187: f"{kept} entries" for kept in (12, 24, 48, 96)}
TIMES = {1 / times: f"{times} times" for times in (2, 5, 10, 20, 50)}
SMALLER = {ratio: name for ratio, name in TIMES.items() if ratio <= 0.1}
MATCHED = {"am": BOTH, "am, repeat": REPEAT, "am, omp": OMP}
STUDIES = {
    "one_shot": Study(ONE_SHOT, rest(16, 10), KEPT, budgets.BASE),
    "cartridges": Trained(MATCHED, rest(5, 1), dict(list(KEPT.items())[:3])),
    "methods_stories": Study(METHODS, stories, dict(list(TIMES.items())[:3]), seeds=3),
    "methods_retrieval": Study(METHODS, facts(2, 1, 20, 17, 2, own=True), TIMES),
    "retrieval": Study(RETRIEVAL, facts(4, 2, 20, 17, 2), TIMES),
    "retrieval_fifty": Study(RETRIEVAL, facts(2, 1, 50, 7, 2), SMALLER),
    "retrieval_once": Study(RETRIEVAL, facts(2, 1, 100, 1, 9), SMALLER),
    "trained_after": TrainedAfter(
        {"full cache": FULL, "am, omp, context": OWN}, facts(48, 1, 8, 1, 1), {0.25: "4 times"}, seeds=3
    ),
}
FIGURES = {"retrieval": "accuracy", "methods_stories": "nll", "methods_retrieval": "nll"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--only", default="", help="measure only methods whose name has this text; nothing is written")
    parser.add_argument("--small", action="store_true", help="one context, and short trainings; nothing is written")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    study = STUDIES[options.study]
    rows = [row for model in options.models for row in study.rows(model, options.only, options.small)]
    frame = pandas.DataFrame(rows)
    for name in frame.columns.drop(["method", "model", "seed", "size", "context"], errors="ignore"):
        table = frame.pivot_table(index="method", columns="size", values=name, aggfunc=["mean", "sem"], sort=False)
        print(f"\n{name}\n{table.to_string(float_format='{:.4f}'.format)}")
    if not options.small and not options.only:
        write(RESULTS / f"{options.study}.json", rows=rows)
        if options.study in FIGURES:
            lines = frame.pivot_table(index="size", columns="method", values=FIGURES[options.study], sort=False)
            picture = lines.plot(marker="o", figsize=(9, 6), ylabel=FIGURES[options.study]).figure
            picture.savefig(HOUSE / f"docs/{options.study}.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
