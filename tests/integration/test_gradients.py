"""The gradient norm, clipping and averages of a sharded model are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slurm_train.train.ema import Ema
from slurm_train.train.gradients import clip_gradients, gradient_norm
from slurm_train.train.groups import parameter_groups

LAYOUTS = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 4},
    "fsdp_tp": {"dp_shard": 2, "tp": 2},
}


class Net(nn.Module):
    """Layers that tp shards, one that it does not, and sizes that do not divide by the ranks of fsdp."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(self.down(torch.relu(self.up(self.norm(inputs)))))


def loss(model):
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return model(inputs).square().sum()


def net(layout=""):
    """The model in a layout; all data ranks have the same batch, so that gradients are those of one process."""
    model = Net()
    if not layout:
        return model
    axes = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = tuple(name for name in axes if name != "tp")
    if data:
        fully_shard(model.up, mesh=mesh[data])
        fully_shard(model, mesh=mesh[data])
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clipped(layout, limit, scale):
    """The norm alone, the norm of clipping, and the whole gradients after it."""
    model = net(layout)
    (loss(model) * scale).backward()
    alone = gradient_norm(model.parameters(), scale=scale)
    norm = clip_gradients(model.parameters(), limit, scale=scale)
    return alone.item(), norm.item(), [whole(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("limit", "scale"), [(1.0, 1.0), (None, 64.0)])
def test_every_layout_clips_as_one_process(world, layout, limit, scale):
    _, norm, gradients = clipped("", limit, scale)
    for alone, ours, theirs in world(4).run(clipped, layout, limit, scale):
        assert alone == pytest.approx(norm, rel=1e-5)
        assert ours == pytest.approx(norm, rel=1e-5)
        for mine, expected in zip(theirs, gradients, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-6)


def norm_of_placed(placements):
    """The norm of a gradient of ones [6, 5] on a mesh [2, 2], and how it lies afterwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    kept = [Replicate() if placement.is_partial() else placement for placement in placements]
    parameter = nn.Parameter(distribute_tensor(torch.zeros(6, 5), mesh, kept))
    share = torch.ones_like(parameter.detach().to_local())
    for placement in placements:
        share /= 2 if placement.is_partial() else 1
    parameter.grad = DTensor.from_local(share, mesh, placements, shape=(6, 5), stride=(5, 1), run_check=False)
    return gradient_norm([parameter]).item(), parameter.grad.placements == tuple(kept)


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Partial(), Shard(1)),
        (Shard(0), Partial()),
        (Partial(), Replicate()),
        (Partial(), Partial()),
    ],
    ids=str,
)
def test_placements(world, placements):
    assert world(4).run(norm_of_placed, placements) == [(pytest.approx(30**0.5), True)] * 4


def norm_of_stage():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float(dist.get_rank()))
    return gradient_norm([parameter], pp_group=dist.group.WORLD).item()


def test_stages_of_a_pipeline_are_added_up(world):
    assert world(4).run(norm_of_stage) == [pytest.approx((2 * (1 + 4 + 9)) ** 0.5)] * 4


def count_collectives():
    model = net("fsdp_tp")
    loss(model).backward()
    with torch.profiler.profile() as profile:
        gradient_norm(model.parameters())
    return sum(event.name == "c10d::allreduce_" for event in profile.events())


def test_one_collective_an_axis(world):
    assert world(4).run(count_collectives) == [2] * 4


def kinds():
    model = net("tp")
    groups = parameter_groups(model.named_parameters(), ["vectors"])
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, fused=True)
    loss(model).backward()
    optimizer.step()
    known = {parameter: name for name, parameter in model.named_parameters()}
    return [({known[p] for p in group["params"]}, group["weight_decay"]) for group in groups]


def test_sharded_and_plain_parameters_are_apart(world):
    assert world(4).run(kinds)[0] == [
        ({"up.weight", "down.weight"}, 0.5),
        ({"head.weight"}, 0.5),
        ({"norm.weight", "norm.bias", "head.bias"}, 0.0),
        ({"up.bias", "down.bias"}, 0.0),
    ]


def averaged(layout):
    """Outputs before, inside and after an average, and the average of the weights, whole."""
    model = net(layout)
    ema = Ema(dict(model.named_parameters()), decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: ema.update())
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        before = loss(model).item()
        with ema.swapped(model):
            inside = loss(model).item()
        after = loss(model).item()
    return before, inside, after, [whole(average) for average in ema.tensors().values()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_of_a_sharded_model(world, layout):
    before, inside, after, averages = averaged("")
    assert inside != pytest.approx(before, rel=1e-3)
    assert after == before
    for result in world(4).run(averaged, layout):
        assert result[:3] == pytest.approx((before, inside, after), rel=1e-4)
        for mine, expected in zip(result[3], averages, strict=True):
            assert torch.allclose(mine, expected, atol=1e-5)
