"""The routes of a server of rollouts (`sparse-rl serve --rollouts`), in the process of vLLM's own server.

Bodies are those of rollout/wire.py. vLLM's AsyncLLM samples the sequences of a request, and then the workers are asked
for what they have recorded (`take_rollouts`): vLLM's own outputs lack what the last step has recorded.

A request waits at most PATIENCE seconds for its version of the weights; an older one is refused. An update of the
weights waits until all requests that run have ended, also those of other clients, and all later ones wait for the
update. So weights never change under a sequence.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.sampling_params import RequestOutputKind

from rollout.engine import Rollout
from rollout.sampling import NotFiniteLogprobError, Request, token_ids
from rollout.vllm.compat import arguments
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.memory import prompt_groups
from rollout.vllm.sampling import Result, joined
from rollout.vllm.scheduler import PREEMPTED
from rollout.vllm.weights import ModelWeights
from rollout.wire import LOOPBACK, About, Answered, Asked, pack_rollouts, unpack_requests
from sparse_rl.attention.families import cache_shape
from sparse_rl.config import as_mapping
from sparse_rl.errors import NotFiniteError, StoppedError, UserError
from sparse_rl.files import check_readable, open_tensors
from sparse_rl.models.load import load_config, model_fingerprint
from sparse_rl.models.weights import identify
from sparse_rl.policies.make import fingerprint
from sparse_rl.trace import EvictionTrace

ATTEMPTS = 3  # attempts at sampling a sequence; under a policy that evicts, a preemption ends an attempt (scheduler.py)
PATIENCE = 60  # seconds that a request waits for its version of the weights
WEIGHTS = "/rollouts/weights"
KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class StaleError(Exception):
    """A request asks for other weights than the server has, or gets in time."""


class OwnSettings(dict[str, Any]):
    """Our settings in a request's extra_args. Its type shows that they are ours, not those of a client (server.py)."""


class RolloutServer:
    """The state that the routes share, in one event loop. engine : vLLM's AsyncLLM"""

    def __init__(self, engine: Any) -> None:
        self.engine, config = engine, engine.vllm_config
        cache, self.model = arguments.cache_config(config), config.model_config.model
        assert cache is not None
        self.policy, self.config = cache.policy, load_config(self.model)
        self.shape = cache_shape(self.config)[:2]
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.weights = ModelWeights(self.config, self.policy)
        self.about = About(
            policy=fingerprint(self.policy),
            model=model_fingerprint(self.config),
            weights=identify(self.model).fingerprint,
            vocabulary=self.config.vocab_size,
            layers=self.shape[0],
            kv_heads=self.shape[1],
            dtype=self.dtype,
            exact=cache.exact,
            version=0,
            max_batch=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
        )
        self.version = self.recorded = 0
        self.scorers: dict[str, list[str]] | None = None  # their digests
        self.running = self.waiting = 0  # sequences
        self.updating = False
        self.changed = asyncio.Condition()  # of the version and the three values above
        self.requests = 0
        self.free: list[int] = []  # places that were given out before, and are not in use
        self.places = 0  # places that were ever given out
        self.pinged: float | None = None  # time at which the workers were asked something that they have not answered
        self.tasks: set[asyncio.Task[None]] = set()

    async def tell(self) -> About:
        """Return the answer to GET /rollouts. It does not wait for the workers, except for scorers after an update."""
        now = asyncio.get_running_loop().time()
        if self.running and self.pinged is None:  # so no update runs, for which the workers could take long
            self.pinged = now
            self._in_background(self._ping())
        if self.scorers is None:
            ranks = await self.engine.collective_rpc("scorer_digests")
            self.scorers = {name: [head for rank in ranks for head in rank[name]] for name in ranks[0]}
        names = "version", "running", "waiting", "requests", "recorded", "scorers"
        silent = 0.0 if self.pinged is None else now - self.pinged
        return replace(self.about, silent=silent, **{name: getattr(self, name) for name in names})

    async def _ping(self) -> None:
        with suppress(Exception):  # requests get it, too
            await self._take({}, [])
        self.pinged = None

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def counted(self) -> AsyncIterator[None]:
        """Count a request, from its begin until its answer is sent, or the client has left."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    # ---- sampling ---------------------------------------------------------------------------------------------------

    async def sample(self, asked: Asked) -> list[Answered]:
        """Sample the sequences of a request. Raises UserError if they do not fit, StaleError for other weights,
        NotFiniteError for a log-prob that is not finite, and StoppedError if a sequence cannot be finished.
        """
        prompts = token_ids([request.prompt for request in asked.requests], self.about.vocabulary)
        if asked.sampling.forced:
            token_ids([asked.sampling.forced], self.about.vocabulary, "forced text")
        for i, (prompt, request) in enumerate(zip(prompts, asked.requests, strict=True)):
            if len(prompt) + request.max_tokens > self.about.max_model_len:
                wrong = f"prompt {i} has {len(prompt)} tokens: with max_tokens {request.max_tokens}"
                raise UserError(f"{wrong} that is more than max_model_len {self.about.max_model_len}")
            if request.forced is not None:
                token_ids([request.forced], self.about.vocabulary, "completion")
        answers: dict[int, Answered] = {}
        async with self._admitted(asked.version, len(prompts)):
            waiting = asked.requests
            for _ in range(ATTEMPTS):
                answers |= await self._attempt(waiting, asked)
                waiting = [request for request in waiting if request.place not in answers]
                if not waiting:
                    return [answers[request.place] for request in asked.requests]
        often = f"{len(waiting)} sequences were preempted {ATTEMPTS} times"
        raise StoppedError(f"{often}; lower --max-batch or raise --kv-cache-gb")

    @asynccontextmanager
    async def _admitted(self, version: int, count: int) -> AsyncIterator[None]:
        """Wait until the server has a version of the weights; in the `with` block it stays."""
        async with self.changed:
            self.waiting += count
            try:
                async with asyncio.timeout(PATIENCE):
                    await self.changed.wait_for(lambda: not self.updating and self.version >= version)
            except TimeoutError:
                pass
            finally:
                self.waiting -= count
            if self.updating or self.version != version:
                raise StaleError(f"version {version} of the weights was asked for, but the server has {self.version}")
            self.running += count
        try:
            yield
        finally:
            await asyncio.shield(self._release(count))

    async def _release(self, count: int) -> None:
        async with self.changed:
            self.running -= count
            self.changed.notify_all()

    async def _attempt(self, requests: Sequence[Request], asked: Asked) -> dict[int, Answered]:
        """Sample requests. Returns place -> answer, without those that were preempted."""
        while len(self.free) < len(requests):
            self.free.append(self.places)
            self.places += 1
        ours = [self.free.pop() for _ in requests]
        try:
            outputs = await self._begin(dict(zip(ours, requests, strict=True)), asked)
            async with asyncio.TaskGroup() as group:
                pairs = zip(ours, requests, strict=True)
                tasks = [group.create_task(self._one(request, outputs[place])) for place, request in pairs]
            rows = list(zip(ours, requests, [task.result() for task in tasks], strict=True))
            done = [row for row in rows if row[2] is not None]
            lengths = {place: len(request.prompt) + len(output.token_ids) for place, request, output in done}
            lost = [place for place in _with_holders(ours) if place not in lengths]
            ranks = await self._take(lengths, lost)
        except BaseException as error:
            self._in_background(self._forget(ours))  # also if this task is cancelled
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None
        self.free += ours
        taken = zip(done, zip(*ranks, strict=True), strict=True)
        return await asyncio.to_thread(
            lambda: {request.place: self._answer(request, output, results) for (_, request, output), results in taken}
        )

    async def _take(self, lengths: dict[int, int], forgotten: list[int]) -> list[list[Result]]:
        ranks, counts = zip(*await self.engine.collective_rpc("take_rollouts", args=(lengths, forgotten)), strict=True)
        self.recorded = sum(counts)
        return list(ranks)

    async def _forget(self, places: list[int]) -> None:
        await self.engine.abort([str(place) for place in _with_holders(places)])
        await self._take({}, _with_holders(places))
        self.free += places

    async def _begin(self, requests: dict[int, Request], asked: Asked) -> dict[int, Any]:
        """Give the engine requests, by place: those of one prompt, and then their holder (scheduler.py), at the place
        -1 minus that of the first of them. Returns where the engine puts the output of each.
        """
        outputs, place_of = dict[int, Any](), {request.place: place for place, request in requests.items()}

        async def add(place: int, request: Request, prompt: list[int], most: int, **more: str) -> None:
            settings = OwnSettings(place=place, seed=request.seed, sampling=as_mapping(asked.sampling), **more)
            if request.forced is not None:
                settings["forced"] = request.forced
            parameters = SamplingParams(
                max_tokens=most,
                temperature=1.0,  # SequenceSampler applies the real temperature, top_p, top_k and the seed
                extra_args={KEY: settings},
                stop_token_ids=asked.stop,
                ignore_eos=True,  # the stop tokens already include the end-of-sequence tokens
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            tokens = {"type": "token", "prompt_token_ids": prompt}
            outputs[place] = await self.engine.add_request(str(place), tokens, parameters)

        for group in prompt_groups([*requests.values()], self.policy, self.engine.vllm_config):
            first = place_of[group[0].place]
            for request in group:
                shared = {"group": str(first)} if len(group) > 1 else {}
                await add(place_of[request.place], request, request.prompt, request.max_tokens, **shared)
            if len(group) > 1:
                await add(-1 - first, group[0], group[0].prompt[:-1], 1, holds=str(first))
        return outputs

    async def _one(self, request: Request, outputs: Any) -> Any:
        """Return vLLM's output for a sequence, or None if it was preempted."""
        final = (await outputs.get()).outputs[0]
        if final.finish_reason == "error" and final.stop_reason == PREEMPTED:
            return None
        if final.finish_reason == "error":
            raise NotFiniteLogprobError(request.place, 0, len(final.token_ids), self.dtype)
        if final.finish_reason not in ("stop", "length"):
            raise StoppedError(f"sequence {request.place} ended by {final.finish_reason!r}; ask again")
        return final

    def _answer(self, request: Request, output: Any, ranks: Sequence[Result]) -> Answered:
        ids = list(output.token_ids)
        length = len(request.prompt) + len(ids)
        logprobs, model_logprobs, evict_at, sections, supports = joined(ranks, self.shape, length)
        for rank in ranks:
            by_step = np.frombuffer(rank["logprobs"], np.float32).reshape(-1, 2)
            if len(by_step) != len(ids):
                raise RuntimeError(f"the workers recorded {len(by_step)} of the {len(ids)} tokens of a sequence")
            if len(wrong := np.flatnonzero(~np.isfinite(by_step[:, 1]))):
                raise NotFiniteLogprobError(request.place, 0, int(wrong[0]), self.dtype)
        further = self.policy.further(len(request.prompt), length)
        trace = EvictionTrace.recorded(evict_at, {**further, **sections}).beside(supports)
        rollout = Rollout(request.prompt, ids, logprobs, model_logprobs, trace, output.finish_reason)
        versions = [version for rank in ranks for version in rank["versions"]]
        return Answered(rollout, (min(versions), max(versions)))

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def load(self, path: str, version: int) -> None:
        """Replace all weights by those of a file, when nothing runs. Raises UserError for wrong ones, before that."""
        await asyncio.to_thread(self._check, path)
        async with self.changed:
            await self.changed.wait_for(lambda: not self.updating)
            self.updating = True
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.running)
            await self.engine.pause_generation(mode="wait", clear_cache=True)  # for the requests of other clients
            try:
                self.version = -1
                await self.engine.collective_rpc("serve_weights", args=(path, version))
                self.version, self.scorers = version, None
            finally:
                if self.version >= 0:  # else the weights are not whole, and requests wait for the next ones
                    await self.engine.resume_generation()
        finally:
            async with self.changed:
                self.updating = False
                self.changed.notify_all()

    def _check(self, path: str) -> None:
        try:
            with open_tensors(path) as file:
                slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
        except Exception as error:  # safetensors raises many kinds for damage
            raise UserError(f"the body is not a safetensors file (cut short, or of another kind): {error}") from error
        for name, values in slices:
            if values.get_dtype() not in KINDS:
                raise UserError(f"{name!r} has dtype {values.get_dtype()}; send {', '.join(KINDS)}")
        empty = ((name, torch.empty(values.get_shape(), device="meta")) for name, values in slices)
        for _ in self.weights.checked(empty):
            pass

    @property
    def most_bytes(self) -> int:
        """The largest body of weights: all in float32, and their names."""
        return sum(4 * shape.numel() + 4096 for shape in self.weights.shapes.values())


def _with_holders(places: list[int]) -> list[int]:
    return [*places, *(-1 - place for place in places)]


# ---- the routes -----------------------------------------------------------------------------------------------------


def attach(app: Any, engine: Any) -> None:
    """Add the routes to vLLM's app."""
    server, router = RolloutServer(engine), APIRouter()

    @router.get("/rollouts")
    async def about() -> Response:
        return JSONResponse(asdict(await server.tell()))

    async def answer(_: Any, raw_request: HttpRequest) -> Response:
        try:
            answers = await server.sample(await asyncio.to_thread(unpack_requests, await raw_request.body()))
        except Exception as error:
            return _refusal(error)
        return Response(await asyncio.to_thread(pack_rollouts, answers), media_type="application/octet-stream")

    @router.post("/rollouts", dependencies=[Depends(server.counted)])
    async def rollouts(raw_request: HttpRequest) -> Response:
        await raw_request.body()  # what comes after it says that the client has left
        return await with_cancellation(answer)(None, raw_request) or Response(status_code=499)

    @router.post(WEIGHTS)
    async def weights(raw_request: HttpRequest, version: int, file: str = "") -> Response:
        try:
            if file:
                opened = await asyncio.to_thread(_shared, file, version, raw_request.client)
            else:
                opened = await _received(raw_request, server.most_bytes)
            if opened is None:
                return JSONResponse({"version": server.version})
            with opened:  # the workers map it
                await server.load(f"/proc/{os.getpid()}/fd/{opened.fileno()}", version)
        except Exception as error:
            return _refusal(error)
        return JSONResponse({"version": version})

    app.include_router(router)


async def _received(raw_request: HttpRequest, most: int) -> Any:
    """Return a file in memory with a body of weights, of at most `most` bytes."""
    file = open(os.memfd_create("weights"), "wb")  # noqa: SIM115
    async for chunk in raw_request.stream():
        if file.tell() + len(chunk) > most:
            raise UserError(f"the weights of this model have at most {most} bytes")
        file.write(chunk)
    file.flush()
    return file


def _shared(file: str, version: int, client: Any) -> Any:
    """Return the opened file of a client on this machine. Returns None unless it has weights of a version: for a client
    in another container, or behind a tunnel, the path means another file, or none.
    """
    if client is None or client.host not in LOOPBACK or not re.fullmatch(r"/proc/\d+/fd/\d+", file):
        return None
    try:
        check_readable(file, math.inf)
        opened = open(file, "rb")  # noqa: SIM115
        with open_tensors(f"/proc/{os.getpid()}/fd/{opened.fileno()}") as tensors:
            return opened if tensors.metadata()["version"] == str(version) else None
    except Exception:  # safetensors raises many kinds
        return None


def _refusal(error: Exception) -> Response:
    """Return the answer to a request that failed (wire.py). Other errors than those listed are vLLM's, or bugs."""
    kinds = {StaleError: 409, NotFiniteError: 500, StoppedError: 503, ValueError: 400}
    status = next((status for kind, status in kinds.items() if isinstance(error, kind)), None)
    if status is None:
        raise error
    refusal = {"message": str(error), "type": type(error).__name__, "code": status}
    return JSONResponse({"error": refusal}, status)
