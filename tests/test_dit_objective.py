"""DiT's training objective against the published formulas in float64, and what it draws for each sample."""

import math

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from dit_models import SMALL, inputs, small_dit
from operator_reference import relative_error
from torch import nn
from torch.distributions import Normal, kl_divergence

from mhla_diffusion import MHLADiTTransformer2DModel
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError

DIT = family_named("dit")
BETAS = np.linspace(1e-4, 0.02, 1000)


class Predicts(nn.Module):
    """A model whose output is a parameter, for the loss alone; it keeps the arguments it was called with."""

    def __init__(self, output, num_classes=10):
        super().__init__()
        self.output = nn.Parameter(output)
        self.config = type("Config", (), {"num_embeds_ada_norm": num_classes})

    def forward(self, hidden_states, timestep, class_labels):
        self.called_with = hidden_states, timestep, class_labels
        return Transformer2DModelOutput(sample=self.output)


def generators(count, first_seed=0):
    return [torch.Generator().manual_seed(first_seed + i) for i in range(count)]


def prepared(timesteps, seed=0, size=4):
    """Latents, some of them at the ends of the range, and what `prepare` makes of them at the given timesteps."""
    generator = torch.Generator().manual_seed(seed)
    count = len(timesteps)
    clean = (torch.randn(count, 3, size, size, generator=generator) / 2).clamp(-1, 1)
    noise = torch.randn(clean.shape, generator=generator)
    t = torch.tensor(timesteps)
    alpha_bar = torch.from_numpy(np.cumprod(1 - BETAS))[t].view(-1, 1, 1, 1)
    noisy = (alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise).float()
    labels = torch.zeros(count, dtype=torch.long)
    output = torch.randn(count, 6, size, size, generator=generator)
    output[:, :3] = 0.7 * noise + 0.3 * output[:, :3]
    given = {"clean": clean, "noise": noise, "noisy": noisy, "timestep": t, "class_labels": labels}
    return given, output


def reference_losses(given, output):
    """MSE and variational bound (bits per dimension), one sample after the other, in float64.

    Nichol and Dhariwal 2021: eq. 15 for the variance, eqs. 4 to 6 for the bound; Ho et al. 2020: eq. 7 for the
    posterior and eq. 13 for the decoder.
    """
    alphas = 1 - BETAS
    bars = np.cumprod(alphas)
    mses, bounds = [], []
    for i, t in enumerate(given["timestep"].tolist()):
        x0, noise, xt = (given[name][i].double() for name in ("clean", "noise", "noisy"))
        epsilon, v = output[i].double().chunk(2)
        mses.append(((epsilon - noise) ** 2).mean())

        previous = bars[t - 1] if t > 0 else 1.0
        at = max(t, 1)  # the posterior variance at the first step is zero, and replaced by the second's
        posterior_variance = BETAS[at] * (1 - bars[at - 1]) / (1 - bars[at])

        def posterior_mean(x0, xt=xt, t=t, previous=previous):
            return (
                math.sqrt(previous) * BETAS[t] / (1 - bars[t]) * x0
                + math.sqrt(alphas[t]) * (1 - previous) / (1 - bars[t]) * xt
            )

        predicted_x0 = (xt - math.sqrt(1 - bars[t]) * epsilon) / math.sqrt(bars[t])
        share = (v + 1) / 2
        deviation = (share * math.log(BETAS[t]) + (1 - share) * math.log(posterior_variance)).exp().sqrt()
        predicted = Normal(posterior_mean(predicted_x0), deviation)
        if t > 0:
            truth = Normal(posterior_mean(x0), torch.full_like(deviation, math.sqrt(posterior_variance)))
            nats = kl_divergence(truth, predicted)
        else:
            lower = torch.where(x0 < -0.999, 0.0, predicted.cdf(x0 - 1 / 255))
            upper = torch.where(x0 > 0.999, 1.0, predicted.cdf(x0 + 1 / 255))
            nats = -(upper - lower).clamp(min=1e-12).log()
        bounds.append(nats.mean() / math.log(2))
    return torch.stack(mses), torch.stack(bounds)


@pytest.mark.parametrize("timesteps", [[0, 0, 0], [1, 2, 999], [300, 0, 17]])
def test_the_loss_is_the_mean_squared_error_plus_the_bound_in_bits(timesteps):
    given, output = prepared(timesteps)
    losses = DIT.objective().loss(Predicts(output), given)
    mse, bound = reference_losses(given, output)
    assert {name: tuple(loss.shape) for name, loss in losses.items()} == dict.fromkeys(("loss", "mse", "vb"), (3,))
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert torch.allclose(losses["mse"].double(), mse, rtol=1e-5)
    assert torch.allclose(losses["vb"].double(), bound, rtol=2e-4)
    assert torch.equal(losses["loss"], losses["mse"] + losses["vb"])


def test_the_first_step_scores_values_at_the_ends_of_the_range_with_the_open_bins():
    given, output = prepared([0, 0])
    given["clean"] = torch.ones_like(given["clean"])
    given["clean"][1] = -1
    losses = DIT.objective().loss(Predicts(output), given)
    assert torch.allclose(losses["vb"].double(), reference_losses(given, output)[1], rtol=2e-4)


def test_a_model_without_variance_has_no_bound():
    given, output = prepared([3, 500])
    losses = DIT.objective().loss(Predicts(output[:, :3]), given)
    assert set(losses) == {"loss", "mse"}
    assert torch.allclose(losses["loss"].double(), reference_losses(given, output)[0], rtol=1e-5)


def test_the_bound_trains_the_variance_only_and_the_error_the_noise_only():
    given, output = prepared([0, 5, 900])
    for part, trained, fixed in (("vb", slice(3, 6), slice(0, 3)), ("mse", slice(0, 3), slice(3, 6))):
        model = Predicts(output)
        DIT.objective().loss(model, given)[part].sum().backward()
        assert (model.output.grad[:, fixed] == 0).all()
        assert (model.output.grad[:, trained] != 0).float().mean() > 0.9


def test_losses_of_a_wild_model_in_half_precision_are_finite_and_no_gradient_is_nan():
    given, output = prepared([0, 1, 999])
    wild = Predicts((output * 20).half())
    losses = DIT.objective().loss(wild, {n: x.half() if x.is_floating_point() else x for n, x in given.items()})
    losses["loss"].sum().backward()
    assert all(loss.isfinite().all() and loss.dtype == torch.float32 for loss in losses.values())
    assert not wild.output.grad.isnan().any()


def test_the_model_sees_the_noised_latents_at_the_drawn_timestep():
    latents = torch.randn(4, 3, 4, 4)
    labels = {"class_labels": torch.arange(4)}
    given = DIT.objective(label_dropout=0).prepare(Predicts(latents), latents, labels, generators(4))
    alpha_bar = torch.from_numpy(np.cumprod(1 - BETAS))[given["timestep"]].view(-1, 1, 1, 1)
    expected = alpha_bar.sqrt() * latents + (1 - alpha_bar).sqrt() * given["noise"]
    assert relative_error(given["noisy"], expected) < 1e-5
    model = Predicts(torch.zeros(4, 6, 4, 4))
    DIT.objective().loss(model, given)
    for seen, name in zip(model.called_with, ("noisy", "timestep", "class_labels"), strict=True):
        assert torch.equal(seen, given[name])


def test_draws_are_uniform_timesteps_standard_noise_and_labels_dropped_at_the_given_rate():
    count = 4000
    latents = torch.zeros(count, 1, 2, 2)
    labels = {"class_labels": torch.arange(count) % 7}
    given = DIT.objective(label_dropout=0.2).prepare(Predicts(latents, 7), latents, labels, generators(count))
    dropped = given["class_labels"] == 7
    assert dropped.float().mean().item() == pytest.approx(0.2, abs=0.025)
    assert torch.equal(given["class_labels"][~dropped], labels["class_labels"][~dropped])
    t = given["timestep"].double()
    assert t.min() >= 0 and t.max() <= 999 and len(t.unique()) > 900
    assert t.mean().item() == pytest.approx(499.5, abs=20) and t.std().item() == pytest.approx(288.7, abs=10)
    assert given["noise"].mean().item() == pytest.approx(0, abs=0.04)
    assert given["noise"].std().item() == pytest.approx(1, abs=0.03)
    # What is drawn for a sample is drawn independently.
    assert (
        abs(torch.corrcoef(torch.stack([t, given["noise"][:, 0, 0, 0].double(), dropped.double()]))[0, 1:]).max() < 0.06
    )


def test_without_label_dropout_no_label_is_dropped():
    latents, labels = torch.zeros(500, 1, 2, 2), {"class_labels": torch.arange(500) % 7}
    given = DIT.objective(label_dropout=0).prepare(Predicts(latents, 7), latents, labels, generators(500))
    assert torch.equal(given["class_labels"], labels["class_labels"])


@pytest.mark.parametrize("rate", [1.0, -0.1, 1.5])
def test_a_wrong_label_dropout_is_refused(rate):
    with pytest.raises(UserError, match=f"label_dropout={rate} must lie in"):
        DIT.objective(label_dropout=rate)


def test_losses_do_not_depend_on_the_batching():
    torch.manual_seed(0)
    model = MHLADiTTransformer2DModel(**SMALL, mhla={"cpe": True})
    objective = DIT.objective()
    objective.prepare_model(model.train())
    latents, labels = torch.randn(6, 4, 8, 8), torch.arange(6)

    def losses(chosen):
        draws = [torch.Generator().manual_seed(100 + i) for i in chosen]
        given = objective.prepare(model, latents[chosen], {"class_labels": labels[chosen]}, draws)
        return objective.loss(model, given)

    whole = losses(list(range(6)))
    parts = [losses([3]), losses([5, 0, 1]), losses([4, 2])]
    order = [3, 5, 0, 1, 4, 2]
    for name in ("loss", "mse", "vb"):
        assert relative_error(torch.cat([part[name] for part in parts]), whole[name][order]) < 1e-5


@pytest.mark.parametrize("share", [True, False])
def test_preparing_a_model_ends_the_label_dropout_of_diffusers(share):
    torch.manual_seed(0)
    model = MHLADiTTransformer2DModel(**SMALL, share_embedder=share).eval()
    x = {name: value.repeat_interleave(40, 0) for name, value in inputs(batch=1).items()}
    x["class_labels"] = torch.full((40,), 3)
    expected = model(**x).sample
    model.train()
    assert not torch.allclose(model(**x).sample, expected)
    DIT.objective().prepare_model(model)
    assert torch.equal(model(**x).sample, expected)
    x["class_labels"] = torch.full((40,), 10)
    assert model(**x).sample.isfinite().all()


def test_the_objective_trains_a_stock_model_too():
    model = small_dit().train()
    objective = DIT.objective()
    objective.prepare_model(model)
    latents, labels = torch.randn(2, 4, 8, 8), {"class_labels": torch.tensor([1, 2])}
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        given = objective.prepare(model, latents, labels, generators(2))
        loss = objective.loss(model, given)["loss"].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
