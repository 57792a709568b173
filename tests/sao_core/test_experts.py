import torch
from rollout_fixtures import small_model

from sao_core.models.experts import SORTED_EXPERTS, use_sorted_experts


def test_sorted_experts_give_the_outputs_and_gradients_of_the_loop_over_experts() -> None:
    results = []
    for implementation in ("eager", SORTED_EXPERTS):
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


def test_an_expert_that_gets_no_token_is_skipped() -> None:
    model, same = small_model(), small_model()
    same.set_experts_implementation("eager")
    use_sorted_experts(model)
    assert model.config._experts_implementation == SORTED_EXPERTS
    one = torch.tensor([[3]])
    torch.testing.assert_close(model(input_ids=one).logits, same(input_ids=one).logits, atol=1e-5, rtol=1e-5)


def test_a_dense_model_is_left_as_it_is() -> None:
    model = small_model(moe=False)
    before = model.config._experts_implementation
    use_sorted_experts(model)
    assert model.config._experts_implementation == before
