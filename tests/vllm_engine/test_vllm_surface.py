"""Members of vLLM that we override, replace or read beyond its documented interface exist as we expect.

docs/internals.md has the table of these members. The tests start no engine.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[2] / "docs/internals.md"
BACKENDS = "v1.attention.backends"
BASE = "v1.attention.backend"
CONNECTOR = "distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
MANAGER = "v1.core.single_type_kv_cache_manager.FullAttentionManager"
UPDATE = "layer key value kv_cache slot_mapping"
FORWARD = "layer query key value kv_cache attn_metadata output output_scale output_block_scale"

SIGNATURES = {  # name -> all parameters of a function that we override, replace or call
    f"{BASE}.AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    f"{BACKENDS}.cpu_attn.CPUAttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    f"{BACKENDS}.flash_attn.FlashAttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    f"{BACKENDS}.triton_attn.TritonAttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    f"{BASE}.AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
    f"{BACKENDS}.flash_attn.FlashAttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
    f"{BACKENDS}.cpu_attn.CPUAttentionMetadataBuilder._set_isa_to_layers": "layer_names",
    f"{BACKENDS}.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update": UPDATE,
    f"{BACKENDS}.flash_attn.FlashAttentionImpl.do_kv_cache_update": UPDATE,
    f"{BACKENDS}.triton_attn.TritonAttentionImpl.do_kv_cache_update": UPDATE,
    f"{BACKENDS}.cpu_attn.CPUAttentionBackendImpl.forward": FORWARD,
    f"{BACKENDS}.flash_attn.FlashAttentionImpl.forward": FORWARD,
    f"{BACKENDS}.triton_attn.TritonAttentionImpl.forward": FORWARD,
    f"{BASE}.AttentionBackend.customize_spec": "spec",
    f"{BASE}.AttentionBackend.full_cls_name": "",
    f"{BASE}.AttentionBackend.supports_compute_capability": "capability",
    f"{BACKENDS}.registry.register_backend": "backend class_path is_mamba",
    "v1.kv_cache_interface.FullAttentionSpec.max_memory_usage_bytes": "vllm_config",
    "v1.kv_cache_interface.FullAttentionSpec.merge": "specs",
    f"{MANAGER}.get_num_blocks_to_allocate": "request_id num_tokens new_computed_blocks total_computed_tokens "
    "num_local_computed_tokens num_tokens_main_model apply_admission_cap prefill_end",
    f"{MANAGER}.allocate_new_blocks": "request_id num_tokens num_tokens_main_model",
    f"{MANAGER}.allocate_external_computed_blocks": "request_id num_local_computed_tokens num_external_computed_tokens "
    "record_for_zeroing",
    "v1.core.block_pool.BlockPool.touch": "blocks",
    "v1.core.block_pool.BlockPool.get_new_blocks": "num_blocks",
    f"{MANAGER}.remove_skipped_blocks": "request_id processed_computed_tokens num_prompt_tokens",
    f"{MANAGER}.pop_blocks_for_free": "request_id",
    f"{CONNECTOR}.__init__": "vllm_config role kv_cache_config",
    f"{CONNECTOR}.register_kv_caches": "kv_caches",
    f"{CONNECTOR}._get_connector_metadata": "",
    f"{CONNECTOR}.wait_for_save": "",
    f"{CONNECTOR}.build_connector_meta": "scheduler_output",
    f"{CONNECTOR}.update_state_after_alloc": "request blocks num_external_tokens",
    f"{CONNECTOR}.request_finished": "request block_ids",
    f"{CONNECTOR}.get_num_new_matched_tokens": "request num_computed_tokens",
    f"{CONNECTOR}.on_new_request": "request",
    f"{CONNECTOR}.get_finished": "finished_req_ids",
    f"{CONNECTOR}.requires_piecewise_for_cudagraph": "extra_config",
    f"{CONNECTOR}.reset_cache": "",
    "v1.engine.core.EngineCore.collective_rpc": "method timeout args kwargs",
    "v1.core.sched.scheduler.Scheduler.reset_connector_cache": "",
    "v1.worker.gpu_worker.Worker.determine_available_memory": "",
    "v1.worker.gpu_worker.Worker.get_kv_cache_spec": "",
    "v1.worker.cpu_worker.CPUWorker.determine_available_memory": "",
    "model_executor.layers.utils.dispatch_cpu_unquantized_gemm": "layer remove_weight",
    "v1.engine.parallel_sampling.ParentRequest.get_child_info": "index",
    "v1.kv_cache_spec_registry.register_kv_cache_spec": "manager_class uniform_type_base_spec",
    "v1.kv_cache_spec_registry.KVCacheSpecRegistry.check_kv_cache_spec_registry": "kv_cache_spec",
    "v1.worker.gpu_worker.Worker.load_model": "load_dummy_weights",
    "v1.worker.gpu_worker.Worker.execute_model": "scheduler_output",
    "v1.sample.sampler.Sampler.__init__": "logprobs_mode use_fp64_gumbel",
    "v1.worker.gpu.sample.sampler.Sampler.__call__": "logits input_batch",
    "v1.worker.gpu.sample.sampler.Sampler.add_request": "req_idx sampling_params",
    "v1.worker.gpu.sample.sampler.Sampler._sample_random": "processed_logits expanded_idx_mapping idx_mapping_np pos "
    "top_k top_p use_fused_sampler",
    "v1.worker.gpu.model_runner.GPUModelRunner.postprocess_sampled": "idx_mapping sampled_tokens num_sampled "
    "num_rejected query_start_loc",
    "v1.core.sched.scheduler.Scheduler._update_request_with_output": "request new_token_ids is_stale",
    "v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_native": "logits generators k p",
    "v1.engine.input_processor.InputProcessor.process_inputs": "request_id prompt params supported_tasks arrival_time "
    "lora_request tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id kv_hints",
    "model_executor.models.transformers.base.Base._decorate_for_torch_compile": "",
    "forward_context.get_forward_context": "",
    "config.get_current_vllm_config": "",
    "config.get_layers_from_vllm_config": "vllm_config layer_type layer_names",
    "distributed.kv_transfer.get_kv_transfer_group": "",
    "distributed.kv_transfer.has_kv_transfer_group": "",
    "model_executor.models.utils.extract_layer_index": "layer_name num_attn_module",
    "v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": "allow_none group_ids",
    "v1.kv_cache_interface.get_kv_quant_mode": "kv_cache_dtype",
    "entrypoints.launchers.api_server.entry.setup_server": "args reuse_port",
    "engine.arg_utils.AsyncEngineArgs.create_engine_config": "usage_context headless",
    "v1.engine.async_llm.AsyncLLM.from_vllm_config": "vllm_config start_engine_loop usage_context stat_loggers "
    "enable_log_requests aggregate_engine_logging disable_log_stats client_addresses client_count client_index",
    "v1.engine.async_llm.AsyncLLM.shutdown": "timeout",
    "v1.engine.async_llm.AsyncLLM.add_request": "request_id prompt params arrival_time lora_request "
    "tokenization_kwargs trace_headers priority data_parallel_rank session_id prompt_text reasoning_ended "
    "reasoning_parser_kwargs kv_hints",
    "v1.engine.async_llm.AsyncLLM.abort": "request_id internal",
    "v1.engine.async_llm.AsyncLLM.collective_rpc": "method timeout args kwargs",
    "v1.engine.async_llm.AsyncLLM.pause_generation": "mode clear_cache",
    "v1.engine.async_llm.AsyncLLM.resume_generation": "",
    "v1.engine.output_processor.RequestOutputCollector.get": "",
    "entrypoints.launchers.api_server.entry.build_and_serve": "engine_client listen_address sock args peer_loads "
    "uvicorn_kwargs",
    "v1.engine.llm_engine.LLMEngine.step": "",
    "v1.engine.llm_engine.LLMEngine.abort_request": "request_ids internal",
    "v1.engine.llm_engine.LLMEngine.has_unfinished_requests": "",
    "entrypoints.llm.LLM.reset_prefix_cache": "reset_running_requests reset_connector",
}
MEMBERS = {  # class or module -> its fields, properties, methods and names that we use
    f"{BASE}.AttentionMetadataBuilder": "supports_update_block_table",
    f"{BASE}.AttentionBackend": "get_impl_cls get_builder_cls validate_configuration",
    f"{BACKENDS}.registry.AttentionBackendEnum": "CPU_ATTN CUSTOM",
    f"{BASE}.CommonAttentionMetadata": "block_table_tensor seq_lens query_start_loc query_start_loc_cpu slot_mapping "
    "max_seq_len max_query_len replace",
    f"{BACKENDS}.cpu_attn.CPUAttentionMetadata": "num_actual_tokens block_table seq_lens query_start_loc slot_mapping",
    f"{CONNECTOR}": "requires_kv_delivery",
    "v1.kv_cache_interface.FullAttentionSpec": "block_size page_size_bytes head_size head_size_v kv_quant_mode",
    "v1.kv_cache_interface.KVQuantMode": "NONE",
    "v1.core.sched.output.SchedulerOutput": "preempted_req_ids num_scheduled_tokens scheduled_new_reqs "
    "scheduled_cached_reqs kv_connector_metadata",
    "v1.core.sched.output.NewRequestData": "req_id num_computed_tokens",
    "v1.core.sched.output.CachedRequestData": "req_ids num_computed_tokens",
    "sampling_params.StructuredOutputsParams": "json structural_tag",
    "v1.request.Request": "num_tokens num_tokens_with_spec num_output_tokens",
    "v1.request.RequestStatus": "FINISHED_ERROR",
    "v1.outputs.SamplerOutput": "sampled_token_ids",
    "v1.kv_cache_interface.KVCacheConfig": "needs_kv_cache_zeroing kv_cache_groups",
    "v1.kv_cache_interface.KVCacheGroupSpec": "kv_cache_spec",
    "outputs.CompletionOutput": "finish_reason stop_reason",
    "exceptions": "VLLMValidationError",
    "sampling_params.SamplingParams": "seed temperature top_p top_k extra_args",
    "v1.engine.EngineCoreRequest": "prompt_token_ids sampling_params resumable lora_request mm_features prompt_embeds "
    "cache_salt",
    "v1.worker.gpu_input_batch.CachedRequestState": "sampling_params output_token_ids",
    "v1.worker.gpu_input_batch.InputBatch": "req_ids",
    "v1.worker.gpu.input_batch.InputBatch": "req_ids idx_mapping_np num_computed_tokens_np num_scheduled_tokens",
    "v1.worker.gpu.sample.output.SamplerOutput": "sampled_token_ids",
    "model_executor.layers.attention": "Attention",
    "config.CUDAGraphMode": "NONE has_full_cudagraphs",
    "config.ModelConfig": "use_mla is_hybrid is_encoder_decoder get_total_num_kv_heads max_model_len dtype "
    "get_vocab_size model using_transformers_backend",
    "config.CacheConfig": "enable_prefix_caching cache_dtype kv_cache_memory_bytes sliding_window block_size "
    "num_gpu_blocks",
    "config.ParallelConfig": "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size "
    "tensor_parallel_size use_ubatching enable_expert_parallel",
    "config.SchedulerConfig": "async_scheduling scheduler_reserve_full_isl max_num_seqs max_num_batched_tokens",
    "config.CompilationConfig": "cudagraph_mode splitting_ops use_inductor_graph_partition pass_config custom_ops",
    "config.KVTransferConfig": "kv_connector kv_connector_module_path kv_role kv_connector_extra_config",
    "config.VllmConfig": "additional_config speculative_config watermark_config kv_transfer_config "
    "compilation_config compute_hash",
}
ASSIGNED = {  # class -> attributes that its objects get when they are created
    "v1.worker.gpu_model_runner.GPUModelRunner": "sampler requests input_batch query_start_loc vllm_config device",
    "v1.worker.gpu.model_runner.GPUModelRunner": "sampler req_states vllm_config device",
    "v1.worker.gpu.states.RequestState": "req_id_to_index prompt_len",
    "v1.worker.gpu_worker.Worker": "use_v2_model_runner",
    "v1.sample.sampler.Sampler": "topk_topp_sampler logprobs_mode use_fp64_gumbel",
    "v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "enable_caching block_size req_to_blocks "
    "block_pool",
    f"{CONNECTOR}": "_vllm_config _kv_cache_config",
    f"{BASE}.AttentionMetadataBuilder": "vllm_config device",
    "model_executor.layers.attention.Attention": "head_size",
    f"{BACKENDS}.flash_attn.FlashAttentionImpl": "head_size",
    f"{BACKENDS}.triton_attn.TritonAttentionImpl": "head_size",
    f"{BACKENDS}.cpu_attn.CPUAttentionMetadataBuilder": "isa",
    f"{BACKENDS}.cpu_attn.CPUAttentionBackendImpl": "scale sliding_window alibi_slopes sinks logits_soft_cap "
    "kv_sharing_target_layer_name attn_type",
    "v1.request.Request": "request_id status stop_reason resumable num_preemptions all_token_ids "
    "skip_reading_prefix_cache num_computed_tokens",
    "v1.core.block_pool.BlockPool": "num_gpu_blocks",
    "v1.engine.llm_engine.LLMEngine": "engine_core model_config vllm_config",
    "entrypoints.llm.LLM": "llm_engine",
}


def of_vllm(name: str) -> Any:
    """Return the object with the given name in vllm, such as "v1.module.Class.member"."""
    words = ["vllm", *name.split(".")]
    for count in range(len(words), 0, -1):
        try:
            value = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            value = getattr(value, word)
        return value
    raise AssertionError(name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """Register our plugin in this process, as in each of vLLM's processes."""
    from rollout.vllm import register
    from rollout.vllm.compat import arguments

    arguments.check_version()
    register()


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_of_vllm_have_the_expected_parameters(name: str) -> None:
    parameters = [p for p in inspect.signature(of_vllm(name)).parameters if p != "self"]
    assert parameters == SIGNATURES[name].split()


@pytest.mark.parametrize("name", MEMBERS)
def test_classes_and_modules_have_the_members_that_we_use(name: str) -> None:
    owner = of_vllm(name)
    fields = {f.name for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    slots = set(getattr(owner, "__annotations__", {}))
    assert [word for word in MEMBERS[name].split() if not hasattr(owner, word) and word not in fields | slots] == []


@pytest.mark.parametrize("name", ASSIGNED)
def test_objects_get_the_attributes_that_we_use(name: str) -> None:
    source = inspect.getsource(of_vllm(name))
    assert [word for word in ASSIGNED[name].split() if not re.search(rf"self\.{word}\b[^=\n]*=", source)] == []


def test_replaced_members_reach_their_callers_in_vllm() -> None:
    """The callers look them up at each call."""
    from rollout.vllm.compat import plugin

    dispatch = of_vllm("model_executor.layers.utils.dispatch_cpu_unquantized_gemm")
    assert (dispatch.__globals__["__name__"] == plugin.__name__) == plugin.on_cpu()
    runner = of_vllm("v1.worker.gpu_model_runner.GPUModelRunner")
    scheduler = of_vllm("v1.core.sched.scheduler.Scheduler")
    assert scheduler._update_request_with_output.__globals__["__name__"] == "rollout.vllm.scheduler"
    assert "self.sampler(\n                logits=logits" in inspect.getsource(runner._sample)
    assert "self._update_request_with_output(" in inspect.getsource(scheduler.update_from_output)
    for reader in ("v1.core.sched.scheduler", "v1.core.kv_cache_coordinator", "v1.worker.gpu_worker"):
        assert "kv_cache_config.needs_kv_cache_zeroing" in inspect.getsource(of_vllm(reader))
    assert '"llama_4_scaling"' in inspect.getsource(of_vllm("model_executor.models.mistral.MistralAttention"))
    source = inspect.getsource(of_vllm("v1.sample.sampler"))
    assert "self.topk_topp_sampler(" in source
    assert 'f"{index}_{self.request_id}"' in inspect.getsource(of_vllm("v1.engine.parallel_sampling.ParentRequest"))
    assert "resumable=True" in inspect.getsource(of_vllm("v1.engine.async_llm.AsyncLLM._add_streaming_input_request"))
    for route in ("openai.completion", "openai.chat_completion"):
        assert "self._raise_if_error(" in inspect.getsource(of_vllm(f"entrypoints.{route}.serving"))
    assert "dummy_shutdown" in inspect.getsource(of_vllm("entrypoints.launchers.launcher"))


def test_vllms_processes_have_the_expected_names() -> None:
    from rollout.vllm.compat.processes import OF_VLLM

    sources = [inspect.getsource(of_vllm(name)) for name in ("v1.engine.utils", "v1.executor.multiproc_executor")]
    for name, source in zip(OF_VLLM, sources, strict=True):
        assert re.search(rf"""name=f?"{name}[-"_]""", source)


def test_the_padding_of_a_graphs_batch_uses_the_null_block() -> None:
    from vllm.v1.core.block_pool import BlockPool

    assert of_vllm(f"{BACKENDS}.utils.NULL_BLOCK_ID") == 0 == BlockPool(4, False, 16).null_block.block_id
    source = inspect.getsource(of_vllm("v1.worker.gpu_model_runner.GPUModelRunner._build_attention_metadata"))
    assert "blk_table_tensor[num_reqs:num_reqs_padded].fill_(NULL_BLOCK_ID)" in source


def test_both_runners_call_the_connector() -> None:
    """Its `wait_for_save`, by which our plugin works after a forward pass."""
    for runner in ("v1.worker.kv_connector_model_runner_mixin", "v1.worker.gpu.kv_connector"):
        assert ".wait_for_save(" in inspect.getsource(of_vllm(runner))


def test_our_head_sizes_equal_those_of_the_cpu_kernel() -> None:
    from rollout.engine import CPU_HEAD_SIZES

    assert set(CPU_HEAD_SIZES) == set(of_vllm(f"{BACKENDS}.cpu_attn.CPUAttentionBackend.get_supported_head_sizes")())


def test_the_null_block_belongs_to_no_request() -> None:
    """To which our padding is written."""
    from rollout.vllm.compat.paged import NOBODYS

    pool = of_vllm("v1.core.block_pool.BlockPool")(4, False, 16)
    assert pool.null_block.block_id == NOBODYS
    assert NOBODYS not in {block.block_id for block in pool.get_new_blocks(3)}


def test_the_table_lists_every_name() -> None:
    """docs/internals.md lists every name that this file checks, except for the fields of configurations."""
    table = TABLE.read_text()
    names = {name.rpartition(".")[2] for name in SIGNATURES} - {"__init__", "forward_native"}
    names |= {"null_block"}
    for owner, members in [*MEMBERS.items(), *ASSIGNED.items()]:
        names |= set() if owner.startswith("config.") else set(members.split())
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", table)] == []
