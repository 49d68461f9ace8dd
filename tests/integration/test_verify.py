"""`verify` says of a layout whether it gives what one process gives, also of a user's own model."""

import pytest
from torch import nn

from slurm_train.errors import LayoutError
from slurm_train.report.rundir import RunDirectory
from tests.integration.runs import SAMPLE, run_on_rank
from tests.integration.test_matrix import LM
from tests.integration.worlds import WorldError

HERE = "tests.integration.test_verify"
FMNIST = ["+experiment=fmnist", SAMPLE, "train.validation=0"]


class Scaled(nn.Module):
    """A user's model that looks at the size of its hidden layer, of which a tensor-parallel rank has a part."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(784, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        features = self.hidden(images.flatten(1)).relu()
        return self.head(features / features.shape[1])


def verify(overrides, directory, steps):
    return run_on_rank(overrides, directory, "verify", options={"steps": steps})


def told(directory):
    return [event.get("text", "") for event in RunDirectory(directory).events() if event["event"] == "message"]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (["parallel=fsdp_tp", "parallel.sequence=true", "parallel.loss_parallel=true"], 4),
        (["parallel=pp_tp"], 4),
        (["parallel=pp", "parallel.schedule=interleaved"], 2),
    ],
)
def test_a_layout_that_agrees(world, tmp_path, layout, ranks):
    overrides = [*LM, *layout, "model.dropout=0.1", "train.batch_size=48"]
    results = world(ranks).run(verify, overrides, str(tmp_path / "run"), 4)  # the last step has a partial batch
    assert all(result == results[0] for result in results)
    assert results[0]["loss"] < 1e-5 and results[0]["gradient_norm"] < 1e-4
    lines = told(tmp_path / "run")
    assert lines[-1] == "verdict: the layout agrees with one process"
    assert any("dropout 0" in line for line in lines)
    assert sum(line.startswith(("1 ", "2 ", "3 ", "4 ")) for line in lines) == 4


def test_a_model_that_is_wrong_when_it_is_sharded(world, tmp_path):
    overrides = [*FMNIST, f"model._target_={HERE}.Scaled", "parallel=tp"]
    overrides.append("parallel.plan={hidden: colwise, head: rowwise}")
    with pytest.raises(WorldError) as raised:
        world(2).run(verify, overrides, str(tmp_path / "run"), 3)
    assert all("LayoutError" in text for text in raised.value.failures.values())
    assert "verdict: the layout differs in" in told(tmp_path / "run")[-1]
    assert any(line.startswith("head.weight") and line.endswith("WRONG") for line in told(tmp_path / "run"))


def test_one_process_agrees_with_itself(tmp_path):
    assert verify(FMNIST, str(tmp_path / "run"), 2) == {"loss": 0.0, "gradient_norm": 0.0, "weight": 0.0}
    assert LayoutError.exit_code == 1
