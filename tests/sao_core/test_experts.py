import pytest
import torch
from rollout_fixtures import small_model

from sao_core.models import experts
from sao_core.models.experts import CPU_EXPERTS, use_cpu_experts


@pytest.mark.parametrize("wasted", [0, 2**60], ids=["sorted tokens", "all experts"])
def test_cpu_experts_give_the_outputs_and_gradients_of_the_loop_over_experts(
    monkeypatch: pytest.MonkeyPatch, wasted: int
) -> None:
    monkeypatch.setattr(experts, "WASTED_PRODUCTS", wasted)
    results = []
    for implementation in ("eager", CPU_EXPERTS):
        model = small_model()
        model.set_experts_implementation(implementation)
        logits = model(input_ids=torch.arange(40).view(2, 20)).logits
        logits.pow(2).mean().backward()
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (logits, gradients), (same_logits, same_gradients) = results
    torch.testing.assert_close(same_logits, logits, atol=1e-5, rtol=1e-5)
    assert gradients["model.layers.0.mlp.experts.gate_up_proj"].abs().max() > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, atol=1e-5, rtol=1e-4)


def test_an_expert_that_gets_no_token_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "WASTED_PRODUCTS", 0)
    model, same = small_model(), small_model()
    same.set_experts_implementation("eager")
    use_cpu_experts(model)
    assert model.config._experts_implementation == CPU_EXPERTS
    one = torch.tensor([[3]])
    torch.testing.assert_close(model(input_ids=one).logits, same(input_ids=one).logits, atol=1e-5, rtol=1e-5)


def test_a_dense_model_is_left_as_it_is() -> None:
    model = small_model(moe=False)
    before = model.config._experts_implementation
    use_cpu_experts(model)
    assert model.config._experts_implementation == before
