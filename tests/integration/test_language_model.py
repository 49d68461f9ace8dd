"""The language model as a user meets it: it learns, goes on with a text under any layout, and exports its weights."""

import pytest
import torch
from safetensors.torch import load_file

from slurm_train.data.text import Bytes
from slurm_train.errors import UserError
from slurm_train.models.transformer import Transformer
from slurm_train.train.export import export
from tests.integration.runs import losses, run_on_rank, weights

SIZES = {"width": 32, "depth": 2, "heads": 4, "length": 32}
LM = [
    "+experiment=lm",
    *[f"model.{key}={value}" for key, value in SIZES.items()],
    *["data.length=32", "data.test=0.2", "train.batch_size=16", "train.validation=0", "optim.lr=0.01"],
    *["train.schedule.warmup=5", "train.epochs=20", "train.max_steps=60"],
]
HERE = "tests.integration.test_language_model"
PROMPT = {"prompt": "the cat ", "tokens": 12, "temperature": 0.0, "top_k": None, "seed": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Overrides and directory of a run that has learned one sentence."""
    place = tmp_path_factory.mktemp("lm")
    (place / "text.txt").write_text("the cat sat on the mat and " * 400)
    overrides = [*LM, f"data.path={place / 'text.txt'}"]
    run_on_rank(overrides, str(place / "run"))
    return overrides, place / "run"


def generate(overrides, directory, options):
    return run_on_rank(overrides, directory, "generate", options=options)["text"]


def test_it_learns_its_text(trained):
    overrides, directory = trained
    found = losses(directory)
    assert found[60] < 0.3 < 4 < found[1]
    assert generate(overrides, str(directory), PROMPT) == "the cat sat on the m"
    sampled = generate(overrides, str(directory), {**PROMPT, "temperature": 0.5, "top_k": 5})
    assert sampled.startswith("the cat ") and len(sampled) == 20


@pytest.mark.parametrize(
    ("layout", "ranks"), [("parallel=pp", 2), ("parallel=tp_sp", 2), ("parallel=fsdp", 2), ("parallel=pp_tp", 4)]
)
def test_it_goes_on_with_a_text_under_any_layout(world, trained, layout, ranks):
    overrides, directory = trained
    texts = world(ranks).run(generate, [*overrides, layout], str(directory), PROMPT)
    assert texts == ["the cat sat on the m"] * ranks


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_its_weights_go_out_and_into_another_layout(world, trained, tmp_path, suffix):
    overrides, directory = trained
    file = tmp_path / f"weights{suffix}"
    export(directory, file)
    saved = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
    model = Transformer(**SIZES)
    model.load_state_dict(saved)
    again = [*overrides, f"model.init_from={file}", "train.max_steps=1", "optim.lr=0", "parallel=fsdp_tp"]
    world(4).run(run_on_rank, again, str(tmp_path / "run"))
    read = weights(tmp_path / "run")
    assert all(torch.equal(read[name], saved[name]) for name in saved)


def test_a_run_goes_on_without_the_weights_that_it_began_from(trained, tmp_path):
    overrides, directory = trained
    file = tmp_path / "weights.pt"
    export(directory, file)
    again = [*overrides, f"model.init_from={file}", "train.epochs=1", "train.max_steps=2"]
    run_on_rank(again, str(tmp_path / "run"))
    file.unlink()
    run_on_rank([*again, "train.max_steps=3"], str(tmp_path / "run"), attempt=2)
    assert len(losses(tmp_path / "run")) == 3
    assert "test_loss" in run_on_rank(again, str(tmp_path / "run"), "evaluate", attempt=3)


def test_the_averaged_weights_go_on_with_a_text(trained, tmp_path):
    overrides, _ = trained
    never = [*overrides, "train.ema=0.999999", "train.max_steps=30"]  # an average that stays where it began
    run_on_rank(never, str(tmp_path / "run"))
    assert generate(never, str(tmp_path / "run"), PROMPT) != generate(overrides, str(tmp_path / "run"), PROMPT)


class Letters:
    """A data set whose sequences have a length of their own."""

    encode, decode = Bytes.encode, Bytes.decode

    def __new__(cls, path, split="train"):
        return Bytes(split, path, length=32)


def test_a_length_that_nothing_tells_is_asked_for(trained):
    overrides, directory = trained
    data = [f"data._target_={HERE}.Letters", "~data.length", "~data.test"]
    with pytest.raises(UserError, match="data.length: neither the data nor the model says how many tokens"):
        generate([*overrides, *data, "~model.length"], str(directory), PROMPT)
