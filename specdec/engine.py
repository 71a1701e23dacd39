"""The engine: draft, verify, commit. The only module that knows drafters, verifier, scheduler and KV together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.backend.base import Backend
from specdec.choices import bad_word_ids, check_ids, choice_params
from specdec.config import EngineConfig
from specdec.drafter_spec import parse_drafter_spec
from specdec.drafters.base import DraftKV
from specdec.errors import EngineDeadError, RequestError
from specdec.kv_manager.manager import KVManager
from specdec.kv_manager.storage import DraftStorage, KVStorage
from specdec.memory import MemoryPlan
from specdec.output import OutputProcessor
from specdec.pack import PackRow
from specdec.plan import BatchPlan, Event, RowOutcome
from specdec.request import DEFAULT_SCHEDULING, Constraint, Request, SamplingParams, Scheduling
from specdec.runner import ForwardOutput, ModelRunner
from specdec.scheduler.admission import check_prompt, check_queue
from specdec.scheduler.scheduler import Scheduler
from specdec.seeds import choice_seed, derive_seed
from specdec.step_clock import StepClock
from specdec.tree import DraftTree
from specdec.verifier import create_verifier
from specdec.verifier.constraints import Constraints, GrammarCompiler
from specdec.verifier.sampling import NoiseSampler

if TYPE_CHECKING:
    from specdec.models import LoadedModel
    from specdec.scheduler.cost_table import CostTable


class Engine:
    """Generates for many requests at once. Not thread-safe: one thread adds, steps and aborts.

    Build one with `Engine.from_config`. Then: `add` requests, `step` while `has_work`, and read the events.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel, backend: Backend, memory: MemoryPlan) -> None:
        from specdec.drafters.base import DrafterContext
        from specdec.drafters.router import DrafterRouter
        from specdec.drafters.vocabulary import tokenizer_fingerprint

        self.config = config
        self.memory = memory
        self.tokenizer = target.tokenizer
        self.model_name = target.source
        self._weights = target.weights
        self.vocab_size = target.config.vocab_size
        self.max_model_len = min(memory.max_model_len, memory.num_pages * config.page_size)
        self._eos_token_ids = target.eos_token_ids
        self._backend = backend
        self.kv = KVManager(memory.num_pages, config.page_size, prefix_cache=config.prefix_cache)
        spec = target.config
        storage = self._new_storage(spec.num_layers, spec.num_kv_heads, spec.head_dim, target.kv_dtype)
        self.kv.register("target", storage)
        self.target = ModelRunner(target.model, backend, storage)
        compiler = GrammarCompiler(
            target.tokenizer,
            self.vocab_size,
            target.eos_token_ids,
            max_bytes=config.grammar_max_bytes,
            timeout_s=config.grammar_timeout_s,
        )
        self.constraints = Constraints(compiler)
        self.verifier = create_verifier(config.verify_rule, backend, transforms=(self.constraints,))
        context = DrafterContext(
            config=config,
            backend=backend,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            page_size=config.page_size,
            sample=NoiseSampler(backend),
            create_kv=self._create_kv,
            tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
            target=target,
            forced=self.constraints.forced,
        )
        self.drafters = DrafterRouter(context, config.drafter, self.verifier.reads_q)
        if memory.swap_pages:
            self.kv.enable_swap(memory.swap_pages, backend.clock)
        self.outputs = OutputProcessor(target.tokenizer, self.constraints.push)
        self.scheduler = Scheduler(
            config, self.kv, self.drafters.default_limit, self.drafters.forget, backend.clock, catch_up=self.drafters.catch_up
        )
        self._numbers = itertools.count()
        self._news: list[Event] = []
        self._tail_s = 0.0  # of the last step, after it was booked: this one's books carry it
        self.num_steps = 0
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> Engine:
        """Checks the options, plans memory, loads, and measures what steps take where drafts or targets need to know it.

        Args:
            config: every option.
            progress: told what is being done, a line at a time.

        Raises:
            ConfigError: an option cannot be met; raised before weights load.
            ModelError: the target cannot be loaded.
            DrafterError: the drafter cannot be loaded.
        """
        from specdec.startup import load_engine_parts

        say = progress or (lambda _: None)
        engine = cls(config, *load_engine_parts(config, say))
        has_targets = config.target_itl_ms is not None or config.target_ttft_ms is not None
        if config.warm_up_s > 0 and (has_targets or (config.drafter != "off" and config.draft_budget == "auto")):
            engine.warm_up(say)
        return engine

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Starts the cost model from measurements: those kept from an earlier start, or new ones. No request may run."""
        from specdec.warm_up import cached_costs, measure_costs, measure_drafts, model_identity

        config, clock = self.config, self._backend.clock
        models = [part for part in parse_drafter_spec(config.drafter) if self.drafters.keeps_kv(str(part))]

        def measure() -> CostTable | None:
            progress(f"measuring what steps take (once for this model and machine, {config.warm_up_s:g} s at most)")
            table = measure_costs(self.target, self.max_model_len, config.max_batch_tokens, config.warm_up_s, clock)
            if table is None or not models:
                return table
            with torch.inference_mode():
                return measure_drafts(table, self.drafters, self.kv, list(map(str, models)), config, self.max_model_len, clock)

        identity = {**model_identity(self.model_name), "weights": self._weights, "device": str(self._backend.device)}
        identity["drafters"] = [[str(part), model_identity(part.target or "")] for part in models]
        table = cached_costs(identity, measure, clock)
        if table is not None:
            self.scheduler.costs.start(table)

    # Requests

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        drafter: str | None = None,
        prediction: Sequence[int] = (),
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> list[str]:
        """Queues a request.

        Args:
            prompt_ids: at least one token id.
            params: sampling parameters; its choices become requests that share the prompt's KV. With
                `best_of` all of those are told, with logprobs, and picking the best is the caller's.
            request_id: name of the request; a number if not given. Choice i of several is named `{request_id}-{i}`.
            drafter: drafter spec; None takes the configured one.
            prediction: predicted output ids, for the `prediction` drafter.
            scheduling: priority, latency targets and the like.

        Returns:
            Ids of the choices, in order.

        Raises:
            RequestError: a field is wrong; it is named.
            ContextLengthError: the prompt leaves no room for a token.
            OverloadedError: the queue is full, or the first token would come too late.
        """
        if self._closed:
            raise EngineDeadError("the engine is closed: build a new one")
        prompt = [int(token) for token in prompt_ids]
        check_prompt(len(prompt), self.max_model_len)
        for tokens, param in ((prompt, "prompt"), (prediction, "prediction")):
            bad = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
            if bad is not None:
                raise RequestError(f"{param} holds token id {bad}, but ids must lie in [0, {self.vocab_size})", param=param)
        if params.constraint is not None:
            self.compile(params.constraint)
        bad_words = bad_word_ids(params.bad_words, self.tokenizer)
        check_ids(params, bad_words, self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids", param="stop")
        check_queue(len(self.scheduler.waiting), params.num_choices, self.config.max_queue)
        spec = self.config.drafter if drafter is None else drafter
        self.drafters.check(spec)
        number = next(self._numbers)
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        name = request_id if request_id is not None else f"request-{number}"
        ids = [name] if params.num_choices == 1 else [f"{name}-{choice}" for choice in range(params.num_choices)]
        taken = next((choice_id for choice_id in ids if self.outputs.holds(choice_id)), None)
        if taken is not None:
            raise RequestError(f"request id {taken!r} is in use: choose another", param="request_id")
        length = self.max_model_len if params.max_tokens is None else min(len(prompt) + params.max_tokens, self.max_model_len)
        for choice, (choice_id, own) in enumerate(zip(ids, choice_params(params), strict=True)):
            request = Request(
                id=choice_id,
                tokens=list(prompt),
                num_prompt=len(prompt),
                params=own,
                seed=choice_seed(seed, choice),
                max_length=length,
                drafter=spec,
                eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
                prediction=tuple(prediction),
                bad_words=bad_words,
                priority=scheduling.priority,
                parent=ids[0] if choice else None,
                max_draft=scheduling.max_draft,
                target_itl_s=_seconds(scheduling.target_itl_ms, self.config.target_itl_ms),
                target_ttft_s=_seconds(scheduling.target_ttft_ms, self.config.target_ttft_ms),
                user=scheduling.user,
                arrival_s=self._backend.clock(),
            )
            if choice == 0:
                self.scheduler.check(request)
            self.constraints.add(request)
            self.outputs.add(request)
            self.scheduler.add(request)
        return ids

    def compile(self, constraint: Constraint) -> None:
        """Compiles a constraint ahead, so that `add` finds it and no step waits. May be called from any thread.

        Raises:
            RequestError: it is invalid or too costly, or this model cannot be constrained.
        """
        self.constraints.compile(constraint)

    def prepare_constraints(self) -> None:
        """Builds what every constraint needs, so that the first one does not wait for it; nothing where there can be none."""
        with contextlib.suppress(RequestError):
            self.constraints.prepare()

    def abort(self, request_id: str) -> None:
        """Ends a request at any point; its last event comes with the next step. Unknown ids are ignored: it may have ended."""
        request = self.scheduler.remove(request_id)
        if request is None:
            return
        request.finish_reason = "abort"
        self._forget(request)
        self._news.append(Event(request.id, (), (), 0, request.stats, finish_reason="abort"))

    def step_news(self) -> list[Event]:
        """Events that need no step: those of requests aborted since the last one."""
        news, self._news = self._news, []
        return news

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self.scheduler.has_work or bool(self._news)

    # The step

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advances every running request by one draft, verify, commit. Returns what is new."""
        news = self.step_news()
        if not self.scheduler.has_work:
            return news
        clock = StepClock(self._backend.clock, self._tail_s)
        plan = self.scheduler.plan()
        self.kv.reserve(plan)
        clock.mark("host")
        trees = self.drafters.propose(plan)
        clock.mark("draft")
        plan, kept = self.scheduler.trim(plan, self.verifier.shapes(plan, trees))
        trees = [tree.select(keep) for tree, keep in zip(trees, kept, strict=True)]
        output = self.target.forward(self._rows(plan, trees), self.drafters.needs.hidden_layers)
        clock.mark("verify")
        accepted = self.verifier.accept(plan, trees, output.logits)
        clock.mark("sample")
        outcomes = self.outputs.append(plan, trees, accepted)
        clock.mark("host")
        self.kv.commit(plan, outcomes)
        clock.mark("commit")
        self.drafters.observe(plan, trees, outcomes, self._hidden_of(plan, trees, output))
        clock.mark("draft")
        events = self.scheduler.finish(plan, trees, outcomes, clock.cost(self.drafters.draft_s))
        self._release(plan, outcomes)
        self.num_steps += 1
        self._tail_s = clock.since_last()
        return news + events

    def _rows(self, plan: BatchPlan, trees: Sequence[DraftTree]) -> list[PackRow]:
        """The step's rows as the packer wants them."""
        rows = []
        for row, tree in zip(plan.rows, trees, strict=True):
            pending = row.request.tokens[row.cached : row.cached + row.pending]
            rows.append(
                PackRow(
                    tokens=[*pending, *tree.tokens.tolist()] if len(tree) else pending,
                    cached=row.cached,
                    pages=self.kv.pages(row.request.id),
                    num_logits=row.num_logits(len(tree)),
                    parents=tree.parents if len(tree) else None,
                )
            )
        return rows

    def _hidden_of(self, plan: BatchPlan, trees: Sequence[DraftTree], output: ForwardOutput) -> Callable[[int], dict[int, torch.Tensor]]:
        """Row index -> that row's captured states."""
        if not output.hidden:
            return lambda _index: {}
        ends = (0, *itertools.accumulate(row.pending + len(tree) for row, tree in zip(plan.rows, trees, strict=True)))

        def hidden(index: int) -> dict[int, torch.Tensor]:
            return {layer: states[ends[index] : ends[index + 1]] for layer, states in output.hidden.items()}

        return hidden

    def _release(self, plan: BatchPlan, outcomes: Sequence[RowOutcome]) -> None:
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if outcome.finish_reason is not None:
                self._forget(row.request)
        if self.config.check_invariants:
            self.kv.check()

    def _forget(self, request: Request) -> None:
        self.kv.release(request)
        self.drafters.forget(request.id)
        self.outputs.forget(request.id)
        self.constraints.forget(request.id)

    def _create_kv(self, name: str, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> DraftKV:
        return DraftStorage(self.kv, name, self._new_storage(layers, kv_heads, head_dim, dtype))

    def _new_storage(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVStorage:
        pages, size = self.memory.num_pages, self.config.page_size
        host_pages = self.memory.swap_pages
        return KVStorage(layers, pages, size, kv_heads, head_dim, dtype, self._backend.device, host_pages=host_pages, backend=self._backend)

    # Upkeep

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of ended requests."""
        self.kv.reset_prefix_cache()

    def status(self) -> dict[str, Any]:
        """What runs, with which options, and what it came to; JSON values."""
        stats = self.kv.stats
        return {
            "model": self.model_name,
            "config": self.config.to_dict(),
            "max_model_len": self.max_model_len,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "steps": self.num_steps,
            "preemptions": self.scheduler.preemptions,
            "kv": {
                "pages": self.kv.num_pages,
                "available": self.kv.num_available,
                "prefix_queries": stats.queries,
                "prefix_hits": stats.hits,
                "evictions": stats.evictions,
                "swap": self.kv.swap.status() if self.kv.swap is not None else None,
            },
            "scheduler": self.scheduler.status(),
            "drafters": self.drafters.status(),
            "verifier": self.verifier.status(),
        }

    def close(self) -> None:
        """Aborts what runs and ends the drafters' threads; nothing can be added any more."""
        self._closed = True
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self.abort(request.id)
        self.drafters.close()


def _seconds(own_ms: float | None, default_ms: float | None) -> float | None:
    """A request's target, or the configured one."""
    chosen = default_ms if own_ms is None else own_ms
    return None if chosen is None else chosen / 1e3
