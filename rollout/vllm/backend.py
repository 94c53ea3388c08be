"""What eviction changes in an attention backend: physical lengths and slots go in, the queries come out.

`EvictingBuilder` and `EvictingImpl` are mixed into the two parts of a stock backend, `EvictingNames` into the backend:
in backend_cpu.py, and in backend_cuda.py for FlashAttention and Triton. RoPE positions stay logical. In float32 on a
CPU attention is computed as the trainer does (exact.py), where asked to. Without a policy the rest is stock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rollout.vllm import folded
from rollout.vllm.compat import arguments, paged, refusals
from rollout.vllm.context_spec import ContextSpec
from rollout.vllm.exact import attend
from rollout.vllm.plan import Fixed
from rollout.vllm.spec import CleanSpec, EvictingSpec
from sparse_rl.policies.schedule import NEVER


class EvictingBuilder:
    """Mixed into a metadata builder: physical lengths and slots instead of logical ones.

    They are written to memory that stays where it is: a CUDA graph of a whole decode step reads them there.
    """

    supports_update_block_table = False  # it would put logical slots into metadata of ours

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler, device = self.vllm_config.scheduler_config, self.device  # type: ignore[attr-defined]
        self.fixed = Fixed(scheduler.max_num_seqs)
        self.slots = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.long, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """For whole forwards: else Python runs in every layer."""
        config = arguments.cache_config(vllm_config)
        whole = config is not None and config.full_graphs
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if whole else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        state = paged.live_state()
        if state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        common = common_attn_metadata
        seen, starts = common.seq_lens, [common.query_start_loc, common.query_start_loc_cpu]
        rows = len(seen)
        if int(starts[1][-1]) < rows:  # a graph's padding: as requests with one token, in the block that is nobody's
            starts = [torch.arange(rows + 1, dtype=torch.int32, device=each.device) for each in starts]
            seen = seen.clamp(min=1)
        plan = state.make_plan(common.block_table_tensor, seen, *starts)
        state.stay(plan, self.fixed)
        lengths = self.fixed.copy("lengths", plan.lengths.int(), rows)
        slots = self.slots[: len(common.slot_mapping)].copy_(common.slot_mapping)  # may be padded behind
        slots[: len(plan.slots)] = plan.slots
        longest = state.longest(common.max_seq_len, common.max_query_len)
        physical = common.replace(seq_lens=lengths, slot_mapping=slots, max_seq_len=longest)
        return super().build(common_prefix_len, physical, fast_build)  # type: ignore[misc]

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class EvictingImpl:
    """Mixed into an implementation: writes at physical slots, and hands the queries out."""

    config: arguments.CacheConfig | None = None  # of the engine whose model was built last in this process
    longest = NEVER  # tokens of its sequences
    head_size: int
    wide = 0  # the head size of the cache, where biases are folded into it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        EvictingImpl.config = config = arguments.cache_config(vllm_config)
        EvictingImpl.longest = vllm_config.model_config.max_model_len
        if config is not None and (config.physical or config.exact):
            refusals.refuse_layer(self, config)
        if config is not None and config.physical:
            refusals.refuse_unsupported(vllm_config, config.full_graphs)
            if config.folds:
                # the stock implementations part keys from values by their own head size
                self.head_size = self.wide = folded.wide_head(self.head_size, arguments.on_cpu())

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        # The slots that vLLM hands over come from the forward context and are logical; those of the metadata are ours.
        metadata: Any = get_forward_context().attn_metadata
        state = paged.live_state()
        if state is not None and metadata is not None:
            if state.arrive(layer.layer_name, key, value):
                return
            slot_mapping = metadata[layer.layer_name].slot_mapping
        if self.wide:
            key, value = (folded.widened(one, self.wide) for one in (key, value))
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        m, config, state, stock = attn_metadata, EvictingImpl.config, paged.live_state(), super().forward  # type: ignore[misc]
        if m is None:
            return stock(layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        scale: float = self.scale  # type: ignore[attr-defined]
        if config is not None and config.exact:
            keys, values = paged.key_value_views(kv_cache, transposed=True)
            q, out = (x[: m.num_actual_tokens] for x in (query, output.view(query.shape)))
            bias = None if state is None else state.bias(layer.layer_name)
            attend(q, keys, values, m.block_table, m.seq_lens, m.query_start_loc, scale, out, bias)
        elif self.wide:
            coordinates = zip((query, key, value), (1 / scale, 0.0, 0.0), strict=True)
            heads = [folded.widened(one, self.wide, coordinate) for one, coordinate in coordinates]
            out = stock(layer, *heads, kv_cache, m, torch.zeros_like(heads[0]), *args, **kwargs)
            output.view(query.shape).copy_(out.view(heads[0].shape)[..., : query.shape[-1]])
        else:
            output = stock(layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        if state is not None:
            state.after_layer(layer.layer_name, query)
        return output


class EvictingNames:
    """Mixed into a backend: it names a builder and an implementation of ours, and gives layers their specification."""

    builder: ClassVar[type]
    impl: ClassVar[type]

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A layer's cache spec under the policy of the engine that is being built."""
        config = EvictingImpl.config
        if config is None:
            return spec
        if not config.physical:
            return CleanSpec.of(spec) if type(spec) is FullAttentionSpec else spec
        refusals.refuse_spec(spec)
        if config.folds:
            wide = folded.wide_head(spec.head_size, arguments.on_cpu())
            spec = replace(spec, head_size=wide, head_size_v=wide)
        if config.contexts is not None:
            return ContextSpec.of(spec, most=config.most)
        schedule, longest = config.policy.schedule, EvictingImpl.longest
        return EvictingSpec.of(spec, schedule=schedule, max_prompt=config.max_prompt, longest=longest)
