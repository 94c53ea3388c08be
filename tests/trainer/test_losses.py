"""The distillation loss and its gradients equal plain float64 arithmetic, for every divergence, top-k, weight and chunk
size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import DistillationLossConfig
from trainer.losses import DistillationLoss, TopK

POSITIONS, VOCAB, WIDTH = 23, 40, 12
KINDS = ("forward", "reverse", "jsd")


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(POSITIONS, WIDTH, generator=generator),
        "weight": torch.randn(VOCAB, WIDTH, generator=generator),
        "teacher": 3 * torch.randn(POSITIONS, VOCAB, generator=generator),
        "targets": torch.randint(VOCAB, (POSITIONS,), generator=generator),
    }


def reference(case, loss, top_k):
    """Compute the summed loss and its gradients for `hidden` and `weight` by the formulas, in float64, in a loop over
    positions."""
    hidden = case["hidden"].double().requires_grad_()
    weight = case["weight"].double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for n in range(POSITIONS):
        logits = weight @ hidden[n]
        s = (logits / loss.temperature).softmax(-1)
        p = (case["teacher"][n].double() / loss.temperature).softmax(-1)
        if top_k is not None:
            likeliest = p.argsort(descending=True)[:top_k]
            p, s = p[likeliest], s[likeliest]
            if loss.renormalise:
                p, s = p / p.sum(), s / s.sum()
            elif top_k < VOCAB:
                p, s = torch.cat([p, 1 - p.sum()[None]]), torch.cat([s, 1 - s.sum()[None]])

        def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * (a / b).log()).sum()

        m = loss.jsd_beta * p + (1 - loss.jsd_beta) * s
        divergence = {
            "forward": kl(p, s),
            "reverse": kl(s, p),
            "jsd": loss.jsd_beta * kl(p, m) + (1 - loss.jsd_beta) * kl(s, m),
        }[loss.divergence]
        cross = -logits.log_softmax(-1)[case["targets"][n]]
        total = total + loss.kl_weight * loss.temperature**2 * divergence + loss.ce_weight * cross
    total.backward()
    return total.detach(), hidden.grad, weight.grad


def computed(case, loss, top_k):
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()

    def teacher(part: slice) -> torch.Tensor | TopK:
        logits = case["teacher"][part]
        return logits if top_k is None else TopK.of_logits(logits, top_k, loss.temperature)

    total, *_ = DistillationLoss(loss)(hidden, lambda h: h @ weight.T, teacher, case["targets"])
    total.backward()
    return total.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("top_k", [None, 1, 8, VOCAB])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("divergence", KINDS)
def test_loss_and_gradients_equal_the_formulas(divergence, temperature, top_k, case):
    loss = DistillationLossConfig(
        temperature=temperature, divergence=divergence, jsd_beta=0.3, kl_weight=0.9, ce_weight=0.1, chunk=7
    )
    for part, expected in zip(computed(case, loss, top_k), reference(case, loss, top_k), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divergence", KINDS)
def test_a_renormalised_top_k_equals_the_formulas(divergence, case):
    loss = DistillationLossConfig(temperature=1.3, divergence=divergence, top_k=8, renormalise=True)
    for part, expected in zip(computed(case, loss, 8), reference(case, loss, 8), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, POSITIONS, 100])
def test_losses_do_not_depend_on_the_chunk_size(chunk, case):
    whole = computed(case, DistillationLossConfig(ce_weight=0.5, chunk=POSITIONS), None)
    for part, expected in zip(
        computed(case, DistillationLossConfig(ce_weight=0.5, chunk=chunk), None), whole, strict=True
    ):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)


def test_a_coarser_top_k_never_increases_the_loss(case):
    """The divergence of the merged distributions is a lower bound, which approaches the full one as k grows."""
    values = [float(computed(case, DistillationLossConfig(), k)[0]) for k in (1, 4, 16, VOCAB - 1, VOCAB)]
    whole = float(computed(case, DistillationLossConfig(), None)[0])
    assert values == sorted(values)
    assert values[0] < 0.9 * whole
    assert values[-1] == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_number_of_right_tokens_equals_a_plain_count(chunk, case):
    """Six targets have the largest logit alone; one shares it with a later token: 7 count."""
    weight, hidden = (case[name].mul(8).round() for name in ("weight", "hidden"))  # so that logits are exact
    weight[VOCAB - 1] = weight[0]
    hidden[6] = hidden[7] = 8 * weight[0]
    logits = [[sum(float(a * b) for a, b in zip(x, w, strict=True)) for w in weight] for x in hidden]
    best = [row.index(max(row)) for row in logits]
    assert best[6] == best[7] == 0
    assert logits[7][VOCAB - 1] == logits[7][0]
    targets = torch.tensor([*best[:7], VOCAB - 1, *((token + 1) % (VOCAB - 1) for token in best[8:])])
    hidden.requires_grad_()
    with Counted("aten::argmax") as counted:
        loss, _, _, right = DistillationLoss(DistillationLossConfig(chunk=chunk))(
            hidden, lambda h: h @ weight.T, lambda part: case["teacher"][part], targets
        )
        forward = counted.calls
        loss.backward()
    assert float(right) == 7
    assert not right.requires_grad
    assert forward == -(-POSITIONS // chunk)
    assert counted.calls == forward


class Counted(TorchDispatchMode):
    """Counts the calls of an operation. name : its name, such as aten::argmax"""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function.name().partition(".")[0] == self.name
        return function(*args, **(kwargs or {}))


def test_a_teacher_equal_to_the_student_has_zero_loss(case):
    same = {**case, "teacher": case["hidden"] @ case["weight"].T}
    for divergence in KINDS:
        loss, hidden, weight = computed(same, DistillationLossConfig(temperature=2.0, divergence=divergence), None)
        assert abs(float(loss)) < 1e-5
        assert float(hidden.abs().max()) < 1e-5
        assert float(weight.abs().max()) < 1e-5


def test_the_loss_of_a_certain_teacher_is_finite(case):
    sure = torch.full((POSITIONS, VOCAB), -1e4)
    sure[:, 0] = 1e4
    for top_k in (None, 4):
        for divergence in ("forward", "jsd"):
            parts = computed({**case, "teacher": sure}, DistillationLossConfig(divergence=divergence), top_k)
            assert all(bool(part.isfinite().all()) for part in parts), (top_k, divergence)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("top_k", [None, 16])
def test_memory_grows_with_the_chunk_not_with_the_sequence(top_k):
    """Control: with one chunk for all positions, the full logits are created."""
    vocab, positions = 5000, 512

    def measure(chunk: int) -> tuple[int, int]:
        weight = torch.randn(vocab, WIDTH).requires_grad_()
        teacher_states = torch.randn(positions, WIDTH)
        hidden, targets = torch.randn(positions, WIDTH).requires_grad_(), torch.zeros(positions, dtype=torch.long)
        kept: list[int] = []

        def teacher(part: slice) -> torch.Tensor | TopK:
            logits = teacher_states[part] @ weight.detach().T
            return logits if top_k is None else TopK.of_logits(logits, top_k, 1.0)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
                config = DistillationLossConfig(chunk=chunk, ce_weight=0.1)
                loss = DistillationLoss(config)(hidden, lambda h: h @ weight.T, teacher, targets)[0]
            loss.backward()
        return largest.elements, max(kept)

    for chunk in (16, 64):
        largest_tensor, kept = measure(chunk)
        assert largest_tensor == max(chunk * vocab, vocab * WIDTH)
        assert kept <= positions * WIDTH
    assert measure(positions)[0] == positions * vocab  # the control: the full logits in one chunk
