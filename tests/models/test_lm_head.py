"""The torch LM head against the plain computation, alone and inside TRL's fused forward."""

import pytest
import torch

from grpo_nb.models.lm_head import OUTPUTS, ChunkedLogProbs

TOKENS, HIDDEN, VOCABULARY = 50, 16, 37


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr("grpo_nb.models.lm_head.CHUNK_LOGITS", 8 * VOCABULARY)


def head(bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    offset = torch.randn(VOCABULARY, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(VOCABULARY, (TOKENS,))


def plain(hidden, weight, bias, targets, temperature, softcap, scale):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits / temperature
    p = logits.softmax(-1)
    log_p = torch.log_softmax(logits, -1)
    return {
        "log_probs": log_p[torch.arange(TOKENS), targets],
        "entropy": -(p * log_p).sum(-1),
        "is_top1": logits.argmax(-1) == targets,
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("bias", "softcap", "scale"), [(False, None, 1.0), (True, 5.0, 0.5)])
def test_values_and_gradients_are_those_of_log_softmax(temperature, bias, softcap, scale):
    inputs = head(bias)
    log_probs, entropy, *_, top = ChunkedLogProbs.apply(
        *inputs, temperature, 32768, softcap, scale, OUTPUTS
    )
    ours = (log_probs, entropy, top)
    expected = plain(*inputs, temperature, softcap, scale)
    for value, (name, other) in zip(ours, expected.items(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5, msg=name)
    weights = torch.randn(2, TOKENS)  # of the loss: both outputs that have a gradient
    leaves = [leaf for leaf in inputs[:3] if leaf is not None]
    pairs = (ours[:2], (expected["log_probs"], expected["entropy"]))
    got, want = (torch.autograd.grad((weights * torch.stack(pair)).sum(), leaves) for pair in pairs)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_is_computed_and_no_token_still_has_a_gradient():
    hidden, weight, _, targets = head()
    how = (1.0, 1, None, 1.0, ("is_top1",))
    values = ChunkedLogProbs.apply(hidden, weight, None, targets, *how)
    assert [value is None for value in values] == [False, True, True, True, False]
    assert values[0].requires_grad and not values[4].requires_grad
    none = ChunkedLogProbs.apply(hidden[:0], weight, None, targets[:0], *how)
    none[0].sum().backward()
    assert none[0].shape == (0,)
    assert hidden.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_ignored_labels_in_trls_fused_forward(monkeypatch):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ChunkedLogProbs)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, vocab_size=37)
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(37, (3, 12))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, -100)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    fused = model(input_ids=ids, labels=labels, fused_lm_head=True)
    fused.loss.backward()
    torch.testing.assert_close(fused.loss, loss)
    assert (fused.log_probs[labels[:, 1:] == -100] == 0).all()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-5)
