"""Compiled FlexAttention on a GPU is exact at production shapes, needs few graphs, and trains a model as SDPA does."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.startup import compile_ahead
from sparse_rl.attention.views import make_view
from sparse_rl.kernels import flex
from sparse_rl.kernels.flex import flex_attend
from sparse_rl.kernels.future import attention_lse, future_attention_mass
from sparse_rl.kernels.parity import check_future, check_parity, random_evictions, target_kernel
from sparse_rl.methods.kvpop.config import TargetConfig
from sparse_rl.methods.kvpop.target import FutureTarget
from sparse_rl.trace import EvictionTrace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = pytest.mark.parametrize("kernel", ["flex", "flex_sorted"])
FIRST = pytest.mark.first(0)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "length"),
    [
        (28, 4, 128, 4096),
        (32, 8, 128, 4096),
        (14, 2, 64, 2048),
        pytest.param(14, 2, 64, 2000, marks=FIRST),
        (4, 4, 32, 300),
    ],
)
def test_the_kernels_are_exact(
    kernel: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, length: int
) -> None:
    """At most twice the error of SDPA in the same dtype, against float64."""
    parity = check_parity(kernel, "cuda", dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, length=length)
    assert parity.failure is None


@KERNELS
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (32, 8)])
def test_the_kernels_are_exact_at_16k(kernel: str, heads: int, kv_heads: int) -> None:
    shapes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "length": 16384}
    assert check_parity(kernel, "cuda", torch.bfloat16, **shapes).failure is None


@FIRST
def test_gradients_of_the_log_sum_exp_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-4 of the largest gradient, against a plain masked logsumexp."""
    monkeypatch.setattr(flex, "segment_of", lambda _: 128)
    evict_at = random_evictions(1, 2, 500, 60, torch.Generator().manual_seed(0)).cuda()
    q, k, v = (torch.randn(1, h, 500, 64, device="cuda", requires_grad=True) for h in (4, 2, 2))
    for in_segments in (False, True):
        lse = flex_attend(evict_at, q, k, v, 0.125, in_segments=in_segments, want_lse=True)[1]
        assert lse is not None
        position = torch.arange(500, device="cuda")
        visible = (position <= position[:, None]) & (position[:, None] < evict_at[..., None, :])
        scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.125
        expected = scores.masked_fill(~visible.repeat_interleave(2, 1), float("-inf")).logsumexp(-1)
        gradients, expected_gradients = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (lse, expected))
        for a, b in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-4 * float(b.abs().max()))


@KERNELS
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=FIRST)])
def test_logits_and_gradients_of_a_model_equal_those_under_sdpa(
    kernel: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 without TF32. Four widths compile only two graphs, because they are padded to 768 or 1,024."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.setattr(flex, "segment_of", lambda _: 256)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 64}
    config = Qwen3Config(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, **shape)
    model = adopt(Qwen3ForCausalLM(config)).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    generator = torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    for width in (700, 650, 768, 900):
        ids = torch.randint(64, (2, width), generator=generator).cuda()
        item = [random_evictions(1, 2, width, 90, generator) for _ in range(12)]
        traces = [EvictionTrace.recorded(torch.cat(item[i::2])) for i in range(2)]
        results = []
        for name_of_kernel in (kernel, "sdpa"):
            model.zero_grad()
            view = make_view(traces, [0, 0], width, "cuda", name_of_kernel)
            out = model(input_ids=ids, attention_mask=NO_MASK.cuda(), kv_view=view, use_cache=False).logits
            out.log_softmax(-1)[..., 0].mean().backward()
            results.append((out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-4)
        for name, grad in results[1][1].items():
            torch.testing.assert_close(results[0][1][name], grad, rtol=0, atol=1e-4 * float(grad.abs().max()))
    assert counters["stats"]["unique_graphs"] == 2  # sizes 768 and 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "length"),
    [
        pytest.param((32, 8, 128), 4096, marks=FIRST),
        ((28, 4, 128), 4096),
        ((14, 2, 64), 2000),
        ((32, 8, 128), 16384),
    ],
)
def test_the_scorers_target_equals_the_float64_result(
    dtype: torch.dtype, shape: tuple[int, int, int], length: int
) -> None:
    """By FlexAttention's transposed pass, with the log-sum-exp of the sparse and of the dense attention."""
    assert check_future.__wrapped__(torch.device("cuda", 0), dtype, shape, length).failure is None


@FIRST
def test_flex_computes_the_target_with_two_graphs() -> None:
    """One for the log-sum-exp and one for the mass, under autocast; other lengths, windows and ends compile none."""
    generator = torch.Generator().manual_seed(0)
    assert target_kernel(torch.device("cuda", 0), torch.bfloat16, (4, 2, 64)) == "flex"
    torch._dynamo.reset()
    counters.clear()
    for length, window in ((768, 5), (700, 60), (513, 256)):
        query, key = (torch.randn(2, h, length, 64, generator=generator).cuda() for h in (4, 2))
        evict_at = random_evictions(1, 2, length, 90, generator).expand(2, -1, -1).cuda()
        ends = torch.full((2, length), length, device="cuda")
        ends[1] = length - 100
        with torch.autocast("cuda", dtype=torch.bfloat16):
            mass = FutureTarget(TargetConfig())(query, key, 0.125, window, ends, evict_at)
        query, key = query.bfloat16(), key.bfloat16()
        lse = attention_lse(query, key, scaling=0.125, ends=ends, evict_at=evict_at)
        options = {"window": window, "scaling": 0.125, "ends": ends, "log_sum_exp": lse, "group": "max", "floor": 1e-6}
        torch.testing.assert_close(mass, future_attention_mass(query, key, **options), rtol=0, atol=1e-3)
        assert counters["stats"]["unique_graphs"] == 2  # one graph for the log-sum-exp of the queries, one for the mass


@FIRST
@KERNELS
def test_a_step_uses_the_kernels_compiled_ahead(kernel: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **shape)
    model = adopt(Qwen3ForCausalLM(config)).cuda().train()
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        compile_ahead(kernel, config, 1, 700, torch.device("cuda", 0), torch.float32)
        before = counters["stats"]["unique_graphs"]
        traces = [
            EvictionTrace.recorded(random_evictions(2, 2, 700, 90, torch.Generator().manual_seed(0)).clamp(min=1))
        ]
        view = make_view(traces, [0], 700, "cuda", kernel)
        ids = torch.zeros(1, 700, dtype=torch.long, device="cuda")
        model(input_ids=ids, attention_mask=NO_MASK.cuda(), kv_view=view, use_cache=False).logits.mean().backward()
    assert counters["stats"]["unique_graphs"] == before == 2
