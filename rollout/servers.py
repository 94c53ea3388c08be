"""ServerEngine: samples on servers (`sparse-rl serve MODEL --rollouts`), which may be on other machines. No vLLM here.

The client pulls: a server has lanes, tasks with a request each, for twice its `max_batch` of sequences, and all lanes
take chunks of sequences from one queue. Each sequence has its own seed, so it does not matter which server samples it,
in which chunk, or how often it was lost before. An answer that is damaged, or sampled with other weights, and a server
that hangs, are faults: the chunk goes back to the queue, and the server gets none until it has said what it is, and has
the right weights.

All requests run in one thread with an event loop. So a batch can be under way while the caller does something else.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import platform
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import httpx
from torch import Tensor, distributed

from rollout import wire
from rollout.config import KEY, SERVERS, SamplingConfig
from rollout.context import Context
from rollout.engine import Rollout, Turn, sampling_stage
from rollout.sampling import NotFiniteLogprobError, Request, requests_to_sample, requests_to_simulate, stop_tokens
from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import NotFiniteError, StoppedError, UserError, one_line
from sparse_rl.models.load import load_config, load_generation_config, model_fingerprint
from sparse_rl.models.weights import identify
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import fingerprint

logger = logging.getLogger("sparse_rl")
PIECE = 2**20  # bytes of weights that are sent at a time
CHUNK = 8  # most sequences of a request
LOOK = 10.0  # seconds in which a server must say what it is
ATTEMPTS = 5  # at a chunk that servers answer, but not with rollouts; times the number of servers
MISSED = 2  # looks without an answer, one after another, that end a request
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds after a fault, doubled after each further one
ANOTHER = "; use the engine vllm or hf"
T = TypeVar("T")


class Fault(Exception):
    """A failure of a server that another attempt, or another server, may mend.

    answered : True if it has answered, so that another attempt may fail alike
    """

    def __init__(self, message: str, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Server:
    """A server, as this client sees it.

    about : what it has last said of itself; None if it has never answered
    version : of the weights that it was last seen with
    failures, failed, error : number of faults since its last answer with rollouts, time of the last one, and itself
    up : set while it may be asked for rollouts
    settled : set once it is up, or has failed, after new weights
    hurry, change : set to end its pause after a fault, and the time in which it is up
    local, near : True if it is on this machine; and if it may be able to read files of this process
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
            trust_env=False,  # a proxy of the environment is for other hosts
        )
        self.about: wire.About | None = None
        self.version, self.failures, self.failed = 0, 0, 0.0
        self.error: Exception = Fault("has not answered")
        self.up, self.settled, self.hurry, self.change = (asyncio.Event() for _ in range(4))
        self.local = self.near = httpx.URL(self.url).host in wire.LOOPBACK

    @property
    def place(self) -> str:
        """The URL, together with the machine if it means this machine."""
        return f"{platform.node()} {self.url}" if self.local else self.url

    async def ask(self, method: str, path: str, **options: Any) -> bytes:
        """Return the body of an answer with status 200. Raises Fault, UserError for a request that is refused, and
        NotFiniteError."""
        try:
            reply = await self.http.request(method, path, **options)
        except (httpx.HTTPError, OSError) as error:
            raise Fault(one_line(f"{type(error).__name__} {error}", 200)) from error
        if reply.status_code == 200:
            return reply.content
        try:
            refusal = json.loads(reply.content)["error"]
            kind, text = refusal["type"], refusal["message"]
        except (ValueError, KeyError, TypeError):
            kind, text = "", reply.text
        message = one_line(f"status {reply.status_code}: {text}", 400)
        if kind == NotFiniteLogprobError.__name__:
            raise NotFiniteError(f"{self.url}: {message}")
        mend = {401: f"; set {KEY} to its key", 404: "; start it with sparse-rl serve MODEL --rollouts"}
        if reply.status_code == 400 or (self.about is None and reply.status_code in mend):
            raise UserError(f"{self.url}: {message}{mend.get(reply.status_code, '')}", "rollout.servers")
        raise Fault(message, reply.status_code != 409)


@dataclass
class Batch:
    """Sequences under way.

    advance : called with the number of sequences that have come back
    done : place -> rollout, of those that have come back; `future` has no result
    failed : first place of a chunk -> number of attempts that a server has answered, but not with rollouts
    """

    requests: list[Request]
    sampling: SamplingConfig
    version: int
    advance: Callable[[int], None]
    done: dict[int, Rollout] = field(default_factory=dict)
    failed: Counter[int] = field(default_factory=Counter)
    queue: asyncio.Queue[list[Request]] = field(default_factory=asyncio.Queue)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    wrong: Exception | None = None
    life: float = 0.0  # time of the loop at which a server last showed that it works
    future: Future[None] = field(default_factory=Future)


class ServerEngine:
    """Samples on servers, which have a copy of the weights each. It is only the client: several processes may share
    servers, and then one of them gives a server its weights.

    model, policy, dtype, exact : as of the servers, which are refused if theirs differ
    servers : their URLs; () means those of the environment variable SPARSE_RL_SERVERS, which a launch sets
    key : of the servers; None means the environment variable VLLM_API_KEY, if it is set
    patience : seconds without any working server after which the run stops
    beat : seconds between two looks at a server that a request waits for

    Raises UserError if a server refuses the key, serves no rollouts, or has another policy, model or dtype, and
    StoppedError if no server answers.
    """

    shares_weights = False

    def __init__(
        self,
        model: str | Path,
        policy: Policy,
        *,
        servers: Sequence[str] = (),
        key: str | None = None,
        dtype: str = "float32",
        exact: bool = True,
        patience: float = 600.0,
        beat: float = 15.0,
        progress: bool = False,
    ) -> None:
        if not (servers := servers or os.environ.get(SERVERS, "").split()):
            raise UserError("needs the URL of at least one server: [http://host:8000, ...]", "rollout.servers")
        self.policy, self.dtype, self.progress, self.patience, self.beat = policy, dtype, progress, patience, beat
        self.config, self.generation_config = load_config(str(model)), load_generation_config(model)
        self.identity, self.shape = identify(model), cache_shape(self.config)[:2]
        self.ours = {
            "policy": fingerprint(policy),
            "model": model_fingerprint(self.config),
            "weights": self.identity.fingerprint,
            "dtype": dtype,
            "exact": exact,
            "format": wire.FORMAT,
        }
        self.version: int | None = None  # of the weights that the servers were given; None: those they began with
        self.weights: BinaryIO | None = None  # the same in a file in memory, where this process gives them to a server
        self.given: set[str] = set()  # URLs of the servers that this process gives weights to
        self.shared = False  # True if other processes need the servers, too
        self.batch: Batch | None = None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollouts", daemon=True)
        self.thread.start()
        atexit.register(self.close)
        try:
            self._call(self._connect([Server(url, key or os.environ.get(KEY)) for url in servers]))
        except BaseException:
            self.close()
            raise
        self.max_batch = sum(server.about.max_batch for server in self.servers if server.about is not None)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._result(asyncio.run_coroutine_threadsafe(work, self.loop))

    @staticmethod
    def _result(future: Future[T]) -> T:
        try:
            return future.result()
        finally:
            future.cancel()  # an interrupt leaves it unfinished

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, context: Context | None = None
    ) -> list[Rollout]:
        return self._rollouts(requests_to_sample(prompts, sampling, self.config.vocab_size, context), sampling)

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        return self._rollouts(*requests_to_simulate(prompts, completions, temperature, self.config.vocab_size, context))

    def _rollouts(self, requests: list[Request], sampling: SamplingConfig) -> list[Rollout]:
        with sampling_stage(requests, self.progress) as stage:
            return self.finish(self._begin(requests, sampling, stage.advance))

    def begin(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> Batch:
        """Ask for what `generate` returns, and return at once. Only one batch can be under way."""
        return self._begin(requests_to_sample(prompts, sampling, self.config.vocab_size), sampling)

    def finish(self, batch: Batch) -> list[Rollout]:
        """Wait for the rollouts of a batch, and return them in the order of `generate`."""
        self._result(batch.future)
        return [batch.done[request.place] for request in batch.requests]

    def converse(self, turns: Sequence[Turn], sampling: SamplingConfig, keep: bool = True) -> NoReturn:
        raise UserError(f"a server of rollouts keeps no conversation between its turns{ANOTHER}", "rollout.engine")

    def logprobs(self, prompts: Any, completions: Any, context: Context) -> NoReturn:
        raise UserError(f"a server of rollouts takes no compacted context{ANOTHER}", "rollout.engine")

    def _begin(
        self, requests: list[Request], sampling: SamplingConfig, advance: Callable[[int], None] = lambda _: None
    ) -> Batch:
        if any(request.context is not None for request in requests):
            raise UserError(f"a server of rollouts takes no compacted context{ANOTHER}", "rollout.engine")
        if self.batch is not None and not self.batch.future.done():
            raise RuntimeError("a batch is under way; finish it first")
        if self.version is None and (old := [server for server in self.servers if server.version]):
            wrong = f"{old[0].url} has weights that an earlier run has given it (version {old[0].version})"
            raise UserError(f"{wrong}; start it again", "rollout.servers")
        most = min(server.about.max_model_len for server in self.servers if server.about is not None)
        for request in requests:
            if (length := len(request.prompt)) + request.max_tokens > most:
                wrong = f"prompt {request.place // sampling.n} has {length} tokens: with max_tokens"
                raise UserError(f"{wrong} {request.max_tokens} that is more than the servers' max_model_len {most}")
        self.batch = batch = Batch(requests, sampling, self.version or 0, advance)
        batch.future = asyncio.run_coroutine_threadsafe(self._run(batch), self.loop)
        return batch

    async def _run(self, batch: Batch) -> None:
        size = max(1, min(CHUNK, -(-len(batch.requests) // len(self.servers))))
        for start in range(0, len(batch.requests), size):
            batch.queue.put_nowait(batch.requests[start : start + size])
        # Twice as many as fit: a chunk ends with its longest sequence, and others must wait when shorter ones end.
        counts = {s: -(-2 * (s.about.max_batch if s.about else CHUNK) // size) for s in self.servers}
        most = max(counts.values()) if batch.requests else 0
        # lanes take chunks in this order, so servers take turns
        lanes = [self._lane(s, batch) for number in range(most) for s in self.servers if number < counts[s]]
        tasks = [asyncio.create_task(lane) for lane in lanes]
        begun = batch.life = self.loop.time()
        for server in self.servers:
            server.hurry.set()
        try:
            while tasks and not await _within(batch.over, min(1.0, self.patience / 4)):
                now = self.loop.time()
                if any(server.failures == 0 or server.failed < begun for server in self.servers):
                    batch.life = now
                elif now - batch.life > self.patience:
                    raise self._deserted()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if batch.wrong is not None:
            raise batch.wrong

    async def _lane(self, server: Server, batch: Batch) -> None:
        while True:
            await server.up.wait()
            part = await batch.queue.get()
            if not server.up.is_set():  # it fell while the queue was empty
                batch.queue.put_nowait(part)
                continue
            try:
                answered = await self._watched(server, self._sample(server, part, batch), batch)
            except Fault as fault:
                batch.failed[part[0].place] += fault.answered
                if (failed := batch.failed[part[0].place]) >= ATTEMPTS * len(self.servers):
                    wrong = f"the same sequences have failed {failed} times, on {server.url} at last: {fault}"
                    batch.wrong = StoppedError(wrong)
                    batch.over.set()
                    return
                batch.queue.put_nowait(part)
                self._fail(server, fault, first=server.up.is_set())
            except Exception as error:
                batch.wrong = error
                batch.over.set()
                return
            else:
                server.failures, batch.life = 0, self.loop.time()
                batch.done.update(answered)
                batch.advance(len(answered))
                if len(batch.done) == len(batch.requests):
                    batch.over.set()

    async def _sample(self, server: Server, part: list[Request], batch: Batch) -> dict[int, Rollout]:
        stop = stop_tokens(batch.sampling, self.generation_config, self.config)
        body = await server.ask(
            "POST", "/rollouts", content=wire.pack_requests(part, batch.sampling, stop, batch.version)
        )
        try:
            answers = await asyncio.to_thread(wire.unpack_rollouts, body, part, self.shape, self.config.vocab_size)
        except ValueError as error:
            raise Fault(f"a wrong answer: {error}", True) from error
        if other := [one.versions for one in answers if one.versions != (batch.version, batch.version)]:
            raise Fault(f"sampled with the weights of versions {other[0]}, not {batch.version}")
        return {request.place: one.rollout for request, one in zip(part, answers, strict=True)}

    async def _watched(self, server: Server, work: Coroutine[Any, Any, T], batch: Batch | None = None) -> T:
        """Return the result of a request. Raises Fault if meanwhile the server does not say what it is, has nothing to
        do, or waits in vain for its engine."""
        task, missed = asyncio.create_task(work), 0
        try:
            while not (await asyncio.wait({task}, timeout=self.beat))[0]:
                try:
                    about = await self._look(server)
                    if batch is not None and not about.requests:
                        raise Fault("it samples nothing, although it was asked to")
                    if about.silent > self.patience / 2:
                        raise Fault(f"its engine has not answered for {about.silent:.0f} seconds")
                    missed = 0
                    if batch is not None:
                        batch.life = self.loop.time()
                except (Fault, UserError) as error:
                    missed += 1
                    if missed == MISSED:
                        raise Fault(f"hangs: {error}") from error
            return task.result()
        finally:
            task.cancel()

    # ---- the state of a server --------------------------------------------------------------------------------------

    async def _connect(self, servers: list[Server]) -> None:
        """Wait until all servers have answered, for as long as patience lasts: some may be starting."""
        self.servers = servers
        self.tending = [asyncio.create_task(self._tend(server)) for server in servers]
        until = self.loop.time() + self.patience
        while silent := [server for server in servers if server.about is None]:
            for server in silent:
                if isinstance(server.error, UserError):
                    raise server.error
            if self.loop.time() > until:
                break
            await asyncio.sleep(0.02)
        if len(silent) == len(servers):
            raise self._deserted()
        await asyncio.gather(*(server.settled.wait() for server in servers))

    async def _look(self, server: Server) -> wire.About:
        """Return what a server says of itself. Raises UserError if it is another one than this run needs."""
        try:
            body = await asyncio.wait_for(server.ask("GET", "/rollouts"), LOOK)
            about = wire.About.of(json.loads(body))
        except TimeoutError as error:
            raise Fault(f"no answer to GET /rollouts in {LOOK:g} seconds") from error
        except json.JSONDecodeError as error:
            raise Fault(f"a wrong answer to GET /rollouts: {error}") from error
        for name, ours in self.ours.items():
            theirs = getattr(about, name)
            if theirs != ours and ours != "" and theirs != "":  # an empty fingerprint of weights is unknown
                wrong = f"{server.url} has {name} {theirs}, but this run needs {ours}"
                raise UserError(
                    f"{wrong}; start it for this run's model and cache, with the same sparse-rl", "rollout.servers"
                )
        server.about = about
        return about

    async def _tend(self, server: Server) -> None:
        """Bring a server up, and again after each fault."""
        while True:
            await _within(server.hurry, pause(server.failures))
            server.hurry.clear()
            server.change.clear()
            try:
                await self._prepare(server)
            except Exception as error:
                self._fail(server, error)
                continue
            server.up.set()
            server.settled.set()
            # A process whose own batch is done may have to give weights to a server that other processes need.
            looks = self.shared and server.url in self.given
            await _within(server.change, self.beat if looks else None)

    async def _prepare(self, server: Server) -> None:
        """See that a server has the weights of this run. Raises Fault if it has not."""
        until = self.loop.time() + self.patience / 4
        while True:
            about = await self._look(server)
            server.version = about.version
            if self.version is not None and about.version > self.version:
                raise Fault(f"has weights of version {about.version}, which another run has given it")
            if about.version == (self.version or 0):
                return
            server.up.clear()
            if self.version is None:
                raise Fault(f"has weights of version {about.version}, which an earlier run has given it")
            if server.url in self.given:
                await self._watched(server, self._give(server))
            elif self.loop.time() > until:
                raise Fault("another process has not given it the weights")
            else:
                await asyncio.sleep(FIRST_PAUSE)

    async def _give(self, server: Server) -> None:
        """Give a server the weights: the path of their file, if it can read it, else their bytes."""
        file, version = self.weights, self.version  # the next ones may come while these are given
        assert file is not None
        give = partial(server.ask, "POST", "/rollouts/weights")
        if server.near:
            path = {"version": version, "file": f"/proc/{os.getpid()}/fd/{file.fileno()}"}
            server.near = json.loads(await give(params=path))["version"] == version
        if not server.near:
            size = os.fstat(file.fileno()).st_size

            async def pieces() -> AsyncIterator[bytes]:
                for start in range(0, size, PIECE):
                    yield os.pread(file.fileno(), PIECE, start)

            length = {"Content-Length": str(size)}
            await give(params={"version": version}, content=pieces(), headers=length)

    def _fail(self, server: Server, error: Exception, first: bool = True) -> None:
        """Note a fault. first : False if another request has noted it"""
        server.up.clear()
        if first:
            server.failures, server.failed = server.failures + 1, self.loop.time()
            server.error = error
            news = logging.WARNING if server.failures == 1 and server.about is None else logging.INFO
            logger.log(news, "%s: %s", server.url, error)
        server.settled.set()
        server.change.set()

    def _deserted(self) -> StoppedError:
        whys = "; ".join(f"{server.url}: {server.error}" for server in self.servers)
        wrong = f"no server of rollouts has worked for {self.patience:g} seconds (rollout.patience): {whys}"
        return StoppedError(f"{wrong}. Start the servers again, then this run, with --resume if it is a training")

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give the servers all weights of the model and its scorers, each as (name in transformers' module, tensor), as
        the next version. All processes that sample call this together; one of them gives a server its weights.
        """
        if self.batch is not None and not self.batch.future.done():
            raise RuntimeError("a batch is under way; finish it before the weights change")
        version, given = self._agreed()
        file: BinaryIO | None = None
        if given:
            file = open(os.memfd_create("weights"), "w+b")  # noqa: SIM115  # a server that comes back needs it
            file.write(wire.pack_weights(weights, version))
            file.flush()
        else:
            for _ in weights:  # under ZeRO-3 all processes gather them
                pass
        self._call(self._renew(file, version, given))

    def _agreed(self) -> tuple[int, set[str]]:
        """Return the next version of the weights, the same in all processes, and the servers that this one gives them
        to: those that no process before it has. Also waits until no process samples with the version before."""
        last = max(server.version for server in self.servers) if self.version is None else self.version
        # two runs that share a server by mistake never have the same version
        own: tuple[int, list[str]] = (last + 1 + secrets.randbelow(2**40), [server.place for server in self.servers])
        everyone, rank = [own], 0
        if distributed.is_available() and distributed.is_initialized():
            everyone, rank = [own] * distributed.get_world_size(), distributed.get_rank()
            distributed.all_gather_object(everyone, own)
        taken = {place for _, places in everyone[:rank] for place in places}
        self.shared = len(everyone) > 1
        given = {server.url for server in self.servers if server.place not in taken}
        return max(number for number, _ in everyone), given

    async def _renew(self, file: BinaryIO | None, version: int, given: set[str]) -> None:
        self.weights, self.version, self.given = file, version, given
        for server in self.servers:
            for event in (server.up, server.settled):
                event.clear()
            for event in (server.hurry, server.change):
                event.set()
        await asyncio.gather(*(server.settled.wait() for server in self.servers))
        if all(isinstance(server.error, UserError) and not server.up.is_set() for server in self.servers):
            raise self.servers[0].error

    def scorer_digests(self) -> dict[str, list[str]]:
        """Return what `Engine.scorer_digests` says, without the tensors in which two servers differ."""

        async def looked() -> list[wire.About]:
            until = self.loop.time() + self.patience
            while self.loop.time() < until:
                answers = list[wire.About]()
                for server in self.servers:
                    if server.up.is_set():
                        with suppress(Fault):
                            answers.append(await self._look(server))
                if answers:
                    return answers
                await asyncio.sleep(FIRST_PAUSE)
            raise self._deserted()

        first, *others = [about.scorers for about in self._call(looked())]
        return {name: heads for name, heads in first.items() if all(one.get(name) == heads for one in others)}

    def close(self) -> None:
        if self.loop.is_closed():
            return
        atexit.unregister(self.close)

        async def leave() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in getattr(self, "servers", ()):
                await server.http.aclose()

        self._call(leave())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def pause(failures: int) -> float:
    """Return the seconds that a server is left alone after this number of faults."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1)) if failures else 0.0


async def _within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, at most some seconds. Returns whether it is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
