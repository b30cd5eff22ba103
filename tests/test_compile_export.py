"""torch.compile and torch.export of whole transformers: one graph, few compilations over many resolutions."""

from __future__ import annotations

import io
import warnings

import dit_models
import pytest
import sana_components
import torch
import wan_models
from operator_reference import relative_error

from mhla_diffusion import (
    MHLAConfig,
    MHLADiTTransformer2DModel,
    MHLASanaTransformer2DModel,
    MHLAWanTransformer3DModel,
)


def tiny_dit():
    torch.manual_seed(0)
    mhla = {"blocks": (2, 2), "cpe": True, "gate": True}
    fields = {**dit_models.SMALL, "num_layers": 1, "share_embedder": True, "mhla": mhla}
    return dit_models.disturb(MHLADiTTransformer2DModel(**fields)).eval()


def tiny_sana():
    base = sana_components.small_transformer(num_layers=1)
    return MHLASanaTransformer2DModel.from_base(base, MHLAConfig(blocks=(2, 2), cpe=True, locality=0))


def tiny_wan():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = wan_models.stock_transformer(num_layers=1)
        return MHLAWanTransformer3DModel.from_base(base, MHLAConfig(**wan_models.PUBLISHED))


# Grids of different sizes, divisible by the blocks and not.
FAMILIES = {
    "dit": (tiny_dit, lambda size: dit_models.inputs(size=size), [8, 12, 10, 14]),
    "sana": (tiny_sana, lambda size: sana_components.transformer_inputs(*size), [(4, 6), (6, 4), (5, 7), (7, 9)]),
    "wan": (tiny_wan, lambda size: wan_models.inputs(size), [(4, 4, 6), (4, 6, 6), (3, 5, 7), (5, 5, 7)]),
}


class Counting:
    """A torch.compile backend that runs the traced graph as it is and counts the graphs."""

    graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_compiles_as_one_graph_that_serves_many_resolutions(family):
    build, inputs, sizes = FAMILIES[family]
    model = build()
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    graphs = []
    with torch.no_grad():
        for size in (*sizes, *sizes):
            arguments = inputs(size)
            assert relative_error(compiled(**arguments).sample, model(**arguments).sample) < 1e-4
            graphs.append(counting.graphs)
    # The first size alone, then one graph for each way to cut: into equal blocks, and into unequal ones.
    assert graphs[-1] <= 4 and graphs[len(sizes) :] == [graphs[-1]] * len(sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_transformer_is_saved_and_gives_the_same(family):
    build, inputs, sizes = FAMILIES[family]
    model = build()
    arguments = inputs(sizes[2])  # not divisible
    with torch.no_grad():
        program = torch.export.export(model, (), arguments)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        out = torch.export.load(file).module()(**arguments)
        out = out[0] if isinstance(out, tuple) else out.sample
        assert relative_error(out, model(**arguments).sample) < 1e-4
